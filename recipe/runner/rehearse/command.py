"""The dress rehearsal of a job on GPUs, on a machine without one: on a login node, in minutes, before it is queued."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.faults.preemption import end_on_signals
from recipe.runner.launch.checks import GPUS_AND_DISK, gpu_package_problems, room_problems
from recipe.runner.launch.commands import BAD_INPUT, FAILED, INTERRUPTED, BadInput, as_list
from recipe.runner.launch.compose import compose
from recipe.runner.launch.inputs import model_folder
from recipe.runner.launch.job import Job
from recipe.runner.launch.server_slots import asynchronous_mode
from recipe.runner.launch.values import PreflightError, check_values
from recipe.runner.plan.prediction import plan
from recipe.runner.plan.setup import job_arguments
from recipe.runner.rehearse import cpu_run, material, shrink
from recipe.runner.rehearse.cpu_run import Failed

_USAGE: Final = """\
usage: python -m {} experiment=qwen3_8b nodes=2 gpus=8 [any Hydra override] [setting=value ...]

It takes everything that the training command takes. In this order, until something fails: all checks that the job will
make and the planner's; two real steps on CPUs of the same configuration made small, with validation, checkpoint, kill
and resume. Besides:

  nodes, gpus         the same as trainer.nnodes, trainer.n_gpus_per_node
  substitute=[]       data, model or both: made up where they are not on this machine
  out=FOLDER          a new folder for what the rehearsal writes; without it a temporary one, removed if all went well
  ranks=2             FSDP ranks of the real steps: 1 to 4

Exit status: 0 if nothing failed, 1 if the job would fail, 2 for a wrong argument, 130 if it was interrupted.
"""
_OWN: Final = {"substitute": [], "out": None, "ranks": 2}
_NOT_COVERED: Final = (
    "CUDA kernels (flash-attn, vLLM's), CUDA graphs, compilation; NCCL and traffic between nodes",
    "loading the real weights; learning; the time of a step",
)


@dataclass
class Rehearsal:
    """The job, and what has become known of it.

    Attributes:
        job: What to rehearse.
        overrides: The job's, to which stand-ins are added for what is missing.
        out: Where everything is written.
        ranks: FSDP ranks of the real steps.
        substitute: What may be made up: ``data``, ``model``.
        not_covered: What has not been tried.
    """

    job: Job
    overrides: list[str]
    out: Path
    ranks: int = 2
    substitute: Sequence[str] = ()
    not_covered: list[str] = field(default_factory=lambda: list(_NOT_COVERED))

    def checks(self) -> str:
        """The checks of the job's command before Ray, as on the machine with GPUs, and the planner's."""
        from recipe.runner.launch.start import check  # imports verl

        try:
            composed = compose(self.job, self.overrides)
            check_values(composed)
            self.overrides += material.stand_ins(composed, self.out, self.substitute, self.not_covered)
            config = self.prepared()
        except (HydraException, OmegaConfBaseException, BadInput, PreflightError) as error:
            raise Failed("\n".join(_problems(error))) from None
        problems: list[str] = []
        if asynchronous_mode(config) == "separate_async":
            problems.append(
                "mode=separate_async cannot be rehearsed, because its weights travel by NCCL: take mode=colocate_async"
            )
        try:
            planned = plan(config)
            problems += planned.problems
            # The job may well have another disk.
            self.not_covered += [*gpu_package_problems(config), *room_problems(config, planned.model.parameters)]
        except BadInput as error:
            problems.append(str(error))
        try:
            check(config, self.job, GPUS_AND_DISK)
        except PreflightError as error:
            problems += error.problems
        key, path = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
        if model_folder(path) is None and not any(problem.startswith(key) for problem in problems):
            problems.append(
                f"{key}={path!r} is not on this machine, and the real steps need its tokenizer: download it, give its "
                "folder, or add substitute=model"
            )
        if problems:
            raise Failed("\n".join(dict.fromkeys(problems)))
        return f"{planned.setup.ranks} GPUs, {planned.model.parameters / 1e9:.2f}e9 parameters"

    def prepared(self) -> DictConfig:
        """The job as its command prepares it; Ray's environment, which depends on the machine, is this one's."""
        from recipe.runner.launch.start import prepare  # imports verl

        return prepare(compose(self.job, self.overrides), elsewhere=True)

    def steps(self) -> str:
        """The small job, run for real, killed and resumed; and what it has shown of the job as it is, smaller, not."""
        config, model = self.prepared(), self.out / "model"
        ranks = min(self.ranks, config.trainer.nnodes * config.trainer.n_gpus_per_node)
        tokenizer = material.small_model(config.actor_rollout_ref.model.path, model)
        rows = shrink.shrunk(config, ranks, 1)["data.train_batch_size"]
        data, prompt = material.small_data(config, self.out / "data", tokenizer, rows)
        shrunk = shrink.shrunk(config, ranks, prompt) | {"actor_rollout_ref.model.path": str(model)} | data
        replaced = shrink.replaced(config, ranks, self.out / "run")
        small = [*self.overrides, *shrink.as_overrides(shrunk | replaced)]
        seen = cpu_run.run(self.job.command, small, self.out / "run")
        lines = [seen, "", "as is", "  every setting that is not listed here"]
        for title, settings in (("shrunk", shrunk), ("replaced", replaced)):
            olds = {key: shrink.value_of(config, key) for key in settings}
            lines += [title, *(f"  {key}: {olds[key]} -> {new}" for key, new in settings.items() if olds[key] != new)]
        return "\n".join([*lines, "not covered", *(f"  {line}" for line in self.not_covered)])


def _problems(error: Exception) -> Sequence[str]:
    return error.problems if isinstance(error, PreflightError) else [str(error)]


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The command's own settings, and the job's overrides.

    Raises:
        BadInput: for a wrong argument.
    """
    settings, overrides = job_arguments(arguments, _OWN)
    own = _OWN | settings
    if isinstance(own["substitute"], str):
        own["substitute"] = own["substitute"].split(",")
    if own["substitute"]:
        as_list(own, "substitute", ["data", "model"])
    if own["ranks"] not in (1, 2, 3, 4):
        raise BadInput(f"ranks={own['ranks']!r}: give 1 to 4")
    if own["out"] is not None and Path(own["out"]).exists():
        raise BadInput(f"out={own['out']} exists already: give a new folder, so that nothing of yours is replaced")
    return own, overrides


def main(job: Job, command: str, arguments: Sequence[str]) -> int:
    """Rehearse a job as ``python -m COMMAND ARGUMENTS`` asks; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE.format(command), end="")
        return 0
    try:
        own, overrides = parse(arguments)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    os.environ["VERL_PLATFORM"] = "cpu"  # before verl is imported
    os.environ |= {"VERL_LOGGING_LEVEL": "WARN", "TQDM_DISABLE": "1"}
    out = Path(own["out"] or tempfile.mkdtemp(prefix="fspo-rehearsal-")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    end_on_signals()  # its run ends with it
    rehearsal, status = Rehearsal(job, overrides, out, own["ranks"], own["substitute"]), 0
    try:
        for name, part in (("checks and planner", rehearsal.checks), ("two steps on CPUs", rehearsal.steps)):
            print(f"{name} ...", flush=True)
            print(f"passed: {part()}", flush=True)
    except Failed as failed:
        print("\n".join(f"error: {line}" for line in str(failed).splitlines()), file=sys.stderr)
        status = FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    if status != FAILED and own["out"] is None:
        shutil.rmtree(out, ignore_errors=True)
    else:
        print(f"written to {out}")
    return status
