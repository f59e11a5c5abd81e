"""The command of the planner: predicts memory and time of a run on GPUs, refuses what cannot fit, searches layouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Final

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.launch.commands import BAD_INPUT, BadInput
from recipe.runner.launch.compose import choices, compose, parsed
from recipe.runner.launch.job import Job
from recipe.runner.plan.prediction import plan
from recipe.runner.plan.search import SPARE_GB, search, spare_gb
from recipe.runner.plan.setup import ALIASES, Hardware, job_arguments

_OWN: Final = {name: f"the same as {key}" for name, key in ALIASES.items()} | {
    "model_config": "a config.json to read instead of the one of actor_rollout_ref.model.path",
    "search": "true: try layouts (mode, nodes, parallelism, offloading, ...) instead, keeping every key given here",
    **Hardware.meanings(),
}
_USAGE: Final = """\
usage: python -m {} experiment=qwen3_8b nodes=2 gpus=8 [any Hydra override] [setting=value ...]

Predicts memory and time of a run on GPUs before it starts, and refuses what cannot fit. It takes everything that the
training command takes, and besides:
"""
_NOTES: Final = """
Exit status: 0 if the run fits, 2 if it does not or the input is wrong; each reason is a line on stderr that names the
setting to change. The memory formulas are checked on CPUs (docs/performance.md); times follow from the guesses above
and are for planning, not for comparing algorithms. Formulas and their sources: recipe/runner/plan/."""


def main(job: Job, command: str, arguments: Sequence[str]) -> int:
    """Plan a run of a job as ``python -m COMMAND ARGUMENTS`` asks; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE.format(command), *(f"  {name:20}{meaning}" for name, meaning in _OWN.items()), _NOTES, sep="\n")
        return 0
    try:
        own, overrides = job_arguments(arguments, _OWN)
        if own.get("search"):
            print("\n".join(_searched(job, overrides, Hardware.from_settings(own), own.get("model_config"))))
            return 0
        config = compose(job, overrides, _OWN)
        planned = plan(config, job, Hardware.from_settings(own), own.get("model_config"))
    except (BadInput, HydraException, OmegaConfBaseException, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print("\n".join([*planned.lines(), *job.outlook(config)]))
    for problem in planned.problems:
        print(f"error: {problem}", file=sys.stderr)
    return BAD_INPUT if planned.problems else 0


def _searched(job: Job, overrides: list[str], hardware: Hardware, model_config: str | None) -> Iterator[str]:
    """The cheapest layouts of a job, one a line, in its mode and, where none is given, in the others."""
    fixed = {override.key_or_group for override in parsed(overrides)}
    modes = {"": compose(job, overrides, _OWN)}
    for mode in choices(job, "mode", overrides) if "mode" not in fixed else ():
        other = compose(job, [*overrides, f"mode={mode}"])
        if other.trainer.v1.trainer_mode != modes[""].trainer.v1.trainer_mode:
            modes[mode] = other
    yield f"layouts that leave {SPARE_GB:g} GiB of each GPU, the cheapest first; all figures are estimates"
    yield f"{'GPU hours':>9}{'hours':>7}{'step s':>8}{'GiB left':>10}  overrides"
    for changed, layout in search(job, modes, fixed, hardware, model_config):
        hours, total, gpu_hours = (layout.time[name] for name in ("hours", "total", "gpu_hours"))
        changes = " ".join(f"{key}={str(value).lower()}" for key, value in changed.items()) or "as it is"
        yield f"{gpu_hours:9.3g}{hours:7.1f}{total:8.0f}{spare_gb(layout):10.1f}  {changes}"
