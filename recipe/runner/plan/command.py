"""The command of the planner: predicts the memory of a run, and refuses what cannot fit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.launch.commands import BAD_INPUT, BadInput
from recipe.runner.launch.compose import compose, defaults
from recipe.runner.launch.job import Job
from recipe.runner.launch.values import value_problems
from recipe.runner.plan.prediction import plan
from recipe.runner.plan.setup import ALIASES, Hardware, job_arguments

_OWN: Final = {name: f"the same as {key}" for name, key in ALIASES.items()} | {
    "model_config": "a config.json to read instead of the one of actor_rollout_ref.model.path",
    **Hardware.meanings(),
}
_USAGE: Final = """\
usage: python -m {} experiment=qwen3_8b nodes=2 gpus=8 [any Hydra override] [setting=value ...]

Predicts the memory of a run before it starts, and refuses what cannot fit. It takes everything that the
training command takes, and besides:
"""
_NOTES: Final = """
Exit status: 0 if the run fits, 2 if it does not or the input is wrong; each reason is a line on stderr that names the
setting to change. The memory formulas are checked on CPUs (docs/performance.md). Formulas and their sources:
recipe/runner/plan/."""


def main(job: Job, command: str, arguments: Sequence[str]) -> int:
    """Plan a run of a job as ``python -m COMMAND ARGUMENTS`` asks; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE.format(command), *(f"  {name:20}{meaning}" for name, meaning in _OWN.items()), _NOTES, sep="\n")
        return 0
    try:
        own, overrides = job_arguments(arguments, _OWN)
        config = compose(job, overrides, _OWN)
        if wrong := list(value_problems(config, defaults(job, overrides), classes=False)):
            raise BadInput("\n".join(wrong))
        planned = plan(config, job, Hardware.from_settings(own), own.get("model_config"))
    except (BadInput, HydraException, OmegaConfBaseException, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print("\n".join([*planned.lines(), *job.outlook(config, ())]))
    for problem in planned.problems:
        print(f"error: {problem}", file=sys.stderr)
    return BAD_INPUT if planned.problems else 0
