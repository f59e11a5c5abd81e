"""The dress rehearsal of a job on GPUs, on a machine without one: on a login node, in minutes, before it is queued."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.faults.preemption import end_on_signals
from recipe.runner.faults.resources import needs_of
from recipe.runner.launch import loggers
from recipe.runner.launch.commands import BAD_INPUT, FAILED, INTERRUPTED, BadInput
from recipe.runner.launch.compose import compose
from recipe.runner.launch.inputs import MODEL_AND_DATA, model_folder
from recipe.runner.launch.job import Job
from recipe.runner.launch.run_settings import with_settings_of_run
from recipe.runner.launch.values import PreflightError
from recipe.runner.plan.prediction import plan
from recipe.runner.plan.setup import job_arguments
from recipe.runner.rehearse import cpu_run, material, shrink
from recipe.runner.rehearse.cpu_run import Failed

_USAGE: Final = """\
usage: python -m {} experiment=qwen3_8b nodes=2 gpus=8 [any Hydra override] [setting=value ...]

It takes everything that the training command takes. In this order, until something fails: all checks that the job will
make and the planner's; two real steps on CPUs of the same configuration made small, with validation and checkpoint.
Besides:

  nodes, gpus         the same as trainer.nnodes, trainer.n_gpus_per_node
  substitute=[]       data, model or both: made up where they are not on this machine
  out=FOLDER          a new folder for what the rehearsal writes; without it a temporary one, removed if all went well

Exit status: 0 if nothing failed, 1 if the job would fail, 2 for a wrong argument, 130 if it was interrupted.
"""
_OWN: Final = {"substitute": [], "out": None}
_NOT_COVERED: Final = (
    "CUDA kernels (flash-attn, vLLM's), CUDA graphs, compilation; NCCL and traffic between nodes",
    "loading the real weights; learning; the time of a step",
)


def checked(job: Job, overrides: Sequence[str], substitute: Collection[str] = ()) -> tuple[DictConfig, str, list[str]]:
    """Make the checks of the job's command before Ray, as on the machine with GPUs, and the planner's.

    What ``substitute`` names may be made up: ``data``, ``model``.

    Returns:
        The job as its command prepares it, its size in a sentence, and what cannot be tried on this machine.

    Raises:
        PreflightError: with every problem; those of the model and the data come last, by themselves.
        HydraException, OmegaConfBaseException: for overrides that name nothing.
    """
    from recipe.runner.launch.start import examine  # imports verl

    problems: list[str] = []
    config = compose(job, overrides)
    try:
        planned = plan(config, job)
    except BadInput as error:
        problems += str(error).splitlines()
    else:
        problems += planned.problems
    try:
        config, _, unsettled = examine(config, job, overrides)
    except PreflightError as error:
        problems += error.problems
    problems += loggers.problems(config)  # a login node knows the logins of the job
    if problems:
        raise PreflightError(*dict.fromkeys(problems))
    size = f"{needs_of(config).gpus} GPUs, {planned.model.parameters / 1e9:.2f}e9 parameters"
    absent = material.absent(config, substitute)
    of_inputs = [problem for rule in MODEL_AND_DATA for problem in rule(config)]
    problems = [problem for problem in of_inputs if not any(name in problem for name in absent)]
    key, path = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    if model_folder(path) is None and path not in absent and not any(key in problem for problem in problems):
        problems.append(
            f"{key}={path!r} is not on this machine, and the real steps need its tokenizer: download it, give its "
            "folder, or add substitute=model"
        )
    if problems:
        raise PreflightError(*problems)
    not_covered = [*_NOT_COVERED, *(problem for problem in unsettled if problem not in of_inputs)]
    return config, size, [*not_covered, *(f"{name}: only its size or its columns are real" for name in absent)]


def small_run(job: Job, overrides: Sequence[str], config: DictConfig, out: Path) -> str:
    """Run the small job for real; what it has shown, and every setting that it has in the place of the job's.

    ``config`` is the prepared job. Everything is written to ``out``.

    Raises:
        Failed: as :func:`recipe.runner.rehearse.cpu_run.run`.
    """
    ranks = min(shrink.RANKS, config.trainer.nnodes * config.trainer.n_gpus_per_node)
    tokenizer = material.small_model(config.actor_rollout_ref.model.path, out / "model")
    data, prompt = material.small_data(config, out / "data", tokenizer, ranks * shrink.UPDATES)
    settings = shrink.small_settings(config, ranks, prompt, out / "run")
    settings |= data | {"actor_rollout_ref.model.path": str(out / "model")}
    small = [*overrides, *(f"++{key}={json.dumps(value)}" for key, value in settings.items())]
    seen = cpu_run.run(job.command, small, out / "run")
    olds = {key: shrink.value_of(config, key) for key in settings}
    changed = [f"{key}: {olds[key]} -> {new}" for key, new in settings.items() if olds[key] != new]
    return "\n  ".join([f"{seen}\nchanged; every other setting was the job's", *changed])


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The command's own settings, and the job's overrides.

    Raises:
        BadInput: for a wrong argument.
    """
    settings, overrides = job_arguments(arguments, _OWN)
    own = _OWN | settings
    if isinstance(own["substitute"], str):
        own["substitute"] = own["substitute"].split(",")
    if not isinstance(own["substitute"], list) or any(name not in ("data", "model") for name in own["substitute"]):
        raise BadInput(f"substitute={own['substitute']}: give data, model or both")
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
    status = 0
    try:
        print("checks and planner ...", flush=True)
        overrides = with_settings_of_run(overrides, job)
        config, size, not_covered = checked(job, overrides, own["substitute"])
        print(f"passed: {size}\ntwo steps on CPUs ...", flush=True)
        print(f"passed: {small_run(job, overrides, config, out)}")
        print("not covered", *not_covered, sep="\n  ")
    except (Failed, PreflightError, HydraException, OmegaConfBaseException) as error:
        problems = error.problems if isinstance(error, PreflightError) else str(error).splitlines()
        print(*(f"error: {problem}" for problem in problems), sep="\n", file=sys.stderr)
        status = FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    if status != FAILED and own["out"] is None:
        shutil.rmtree(out, ignore_errors=True)
    else:
        print(f"written to {out}")
    return status
