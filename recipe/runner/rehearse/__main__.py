"""The dress rehearsal of a job on GPUs, on a machine without one: on a login node, in minutes, before it is queued.

usage: python -m recipe.runner.rehearse experiment=qwen3_8b nodes=2 gpus=8 [any Hydra override] [setting=value ...]

Everything that `python -m recipe.fspo.main` takes, it takes, too. In this order, until something fails: all checks that
the job will make and the planner's; two real steps on CPUs of the same configuration made small, with validation,
checkpoint, kill and resume. Besides:

  nodes, gpus         the same as trainer.nnodes, trainer.n_gpus_per_node
  substitute=[]       data, model or both: made up where they are not on this machine
  out=FOLDER          a new folder for what the rehearsal writes; without it a temporary one, removed if all went well
  ranks=2             FSDP ranks of the real steps: 1 to 4

Exit status: 0 if nothing failed, 1 if the job would fail, 2 for a wrong argument, 130 if it was interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.faults.preemption import end_on_signals
from recipe.runner.launch.commands import BAD_INPUT, FAILED, INTERRUPTED, BadInput, as_list, split_arguments
from recipe.runner.launch.compose import compose
from recipe.runner.plan.setup import ALIASES, Hardware

_OWN: Final = {"substitute": [], "out": None, "ranks": 2}
_NOT_COVERED: Final = (
    "CUDA kernels (flash-attn, vLLM's), CUDA graphs, compilation; NCCL and traffic between nodes",
    "loading the real weights; learning; the time of a step",
)


class Failed(Exception):
    """The job would fail; every line of the message names what, and what to change."""


class NotChecked(Exception):
    """Nothing can be said; the message says why."""


@dataclass
class Rehearsal:
    """The job, and what has become known of it.

    Attributes:
        overrides: The job's, to which stand-ins are added for what is missing.
        out: Where everything is written.
        ranks: FSDP ranks of the real steps.
        substitute: What may be made up: ``data``, ``model``.
        not_covered: What has not been tried.
        changes: Settings of the job that the real steps have other values for.
        as_is: Settings that they have, too.
    """

    overrides: list[str]
    out: Path
    ranks: int = 2
    substitute: Sequence[str] = ()
    not_covered: list[str] = field(default_factory=lambda: list(_NOT_COVERED))
    changes: Sequence[Any] = ()
    as_is: Sequence[tuple[str, Any]] = ()

    def checks(self) -> str:
        """The checks of ``recipe.fspo.main`` before Ray, as on the machine with GPUs, and the planner's."""
        from recipe.fspo.main import JOB
        from recipe.runner.launch.checks import gpu_package_problems, room_problems
        from recipe.runner.launch.model_folder import find
        from recipe.runner.launch.start import check
        from recipe.runner.launch.values import PreflightError, check_values
        from recipe.runner.plan.__main__ import plan
        from recipe.runner.rehearse.material import stand_ins

        try:
            given = compose(self.overrides)
            check_values(given)
            self.overrides += stand_ins(given, self.out, self.substitute, self.not_covered)
            config = self.prepared()
        except (HydraException, OmegaConfBaseException, BadInput) as error:
            raise Failed(str(error)) from None
        except PreflightError as error:
            raise Failed("\n".join(error.problems)) from None
        if config.evaluate:
            raise Failed("evaluate=true trains nothing: rehearse the training run")
        self.not_covered += gpu_package_problems(config)
        problems: list[str] = []
        try:
            planned = plan(config, Hardware())
            room = list(room_problems(config, planned["model"]["parameters"]))
            named = any(override.startswith("fspo.run_dir=") for override in self.overrides)
            problems += planned["problems"] + (room if named else [])
            self.not_covered += [] if named else room  # the job may well have another disk
        except (BadInput, OmegaConfBaseException) as error:
            problems.append(str(error))
        try:
            check(config, JOB, elsewhere=True)
        except PreflightError as error:
            problems += error.problems
        key, path = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
        if find(path) is None and not any(problem.startswith(key) for problem in problems):
            problems.append(
                f"{key}={path!r} is not on this machine, and the real steps need its tokenizer: download it, give its "
                "folder, or add substitute=model"
            )
        if problems:
            raise Failed("\n".join(dict.fromkeys(problems)))
        return f"{planned['setup']['ranks']} GPUs, {planned['model']['parameters'] / 1e9:.2f}e9 parameters"

    def prepared(self) -> DictConfig:
        """The job as ``main`` prepares it; Ray's environment, which depends on the machine, is this one's."""
        from recipe.runner.launch.start import prepare

        config = compose(self.overrides)
        device, config.trainer.device = config.trainer.device, "cpu"
        prepare(config)
        config.trainer.device = device
        return config

    def steps(self) -> str:
        """The small job, run for real, killed and resumed."""
        from recipe.runner.faults.resources import rollout_only_ranks
        from recipe.runner.rehearse import cpu_run, material, shrink

        config = self.prepared()
        if rollout_only_ranks(config):
            raise NotChecked("with mode=separate_async weights travel between GPUs, by NCCL")
        ranks = min(self.ranks, config.trainer.nnodes * config.trainer.n_gpus_per_node)
        tokenizer = material.small_model(config.actor_rollout_ref.model.path, self.out / "model")
        data, prompt = material.small_data(config, self.out / "data", tokenizer, shrink.rows(config, ranks))
        self.changes = shrink.changes(config, self.out / "run", self.out / "model", data, prompt, ranks)
        self.as_is = list(shrink.as_is(config, self.changes))
        files = [file for of_key in data.values() for file in of_key]
        scored = _module("reward", json.dumps(shrink.reward(config)), *files)
        if wrong := scored.stdout.strip() or (scored.returncode and scored.stderr[-2000:]):
            path, name = config.reward.custom_reward_function.path, config.reward.custom_reward_function.name
            raise Failed(f"reward.custom_reward_function.path={path}, name={name}: {wrong}")
        try:
            return cpu_run.run(self.overrides, self.changes, self.out / "run")
        except cpu_run.RunFailed as error:
            raise Failed(str(error)) from None

    def table(self) -> Iterator[str]:
        """What was proved as it is, what smaller, what with something else in its place, and what not."""
        yield "as is"
        yield from (f"  {key}: {value}" for key, value in self.as_is)
        for title, replaced in (("shrunk", False), ("replaced", True)):
            yield title
            for change in self.changes:
                if change.replaced == replaced:
                    yield f"  {change.key}: {_short(change.old)} -> {_short(change.new)} ({change.why})"
        yield "not covered"
        yield from (f"  {what}" for what in self.not_covered)


def _module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A part that needs a process of its own, because of what it imports."""
    command = [sys.executable, "-m", f"recipe.runner.rehearse.{name}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def rehearse(rehearsal: Rehearsal) -> bool:
    """Run every part until one fails, print verdicts and the table; returns whether nothing failed."""
    for name, part in (
        ("checks and planner", rehearsal.checks),
        ("two steps on CPUs", rehearsal.steps),
    ):
        began = time.monotonic()
        print(f"{name} ...", flush=True)
        failed = None
        try:
            says = f"passed: {part()}"
        except NotChecked as why:
            says = f"not checked: {why}"
            rehearsal.not_covered.append(f"{name}: {why}")
        except Failed as why:
            says, failed = "FAILED", str(why)
        print(f"{name} ({time.monotonic() - began:.0f} s) {says}", flush=True)
        if failed is not None:
            print("\n".join(f"error: {line}" for line in failed.splitlines()), file=sys.stderr)
            return False
    print("\n".join(["", *rehearsal.table()]))
    return True


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The command's own settings, and the job's overrides.

    Raises:
        BadInput: for a wrong argument.
    """
    own, overrides = split_arguments(arguments, [*ALIASES, *_OWN])
    overrides += [f"{key}={own[name]}" for name, key in ALIASES.items() if name in own]
    own = _OWN | own
    if isinstance(own["substitute"], str):
        own["substitute"] = own["substitute"].split(",")
    if own["substitute"]:
        as_list(own, "substitute", ["data", "model"])
    if own["ranks"] not in (1, 2, 3, 4):
        raise BadInput(f"ranks={own['ranks']!r}: give 1 to 4")
    if own["out"] is not None and Path(own["out"]).exists():
        raise BadInput(f"out={own['out']} exists already: give a new folder, so that nothing of yours is replaced")
    return own, overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m recipe.runner.rehearse``; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(__doc__.rstrip())
        return 0
    try:
        own, overrides = parse(arguments)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    os.environ["VERL_PLATFORM"] = "cpu"  # before verl is imported
    os.environ |= {"VERL_LOGGING_LEVEL": "WARN", "TQDM_DISABLE": "1"}
    warnings.filterwarnings("ignore", message="Disabled critic")  # verl says so for every estimator but GAE
    out = Path(own["out"] or tempfile.mkdtemp(prefix="fspo-rehearsal-")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    end_on_signals()  # its run ends with it
    try:
        passed = rehearse(Rehearsal(overrides, out, own["ranks"], own["substitute"]))
        status = 0 if passed else FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    if status != FAILED and own["out"] is None:
        shutil.rmtree(out, ignore_errors=True)
    else:
        print(f"written to {out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
