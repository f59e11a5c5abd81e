"""What the losses of a grid must be for the grid to compare them; said before its first run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from recipe.fspo.job import choices, compose
from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.machine import WrongMachineError, export_platform


def check(algos: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise BadInput if a loss cannot be compared as it is asked for."""
    shipped = choices("algo")
    for algo in algos:
        if algo not in shipped:
            # In a process of its own: it imports verl and the user's module, and this one outlives many runs.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                problems = pool.submit(problems_of_own, [*overrides, f"algo={algo}"]).result()
            if problems:
                raise BadInput("\n".join(f"algo={algo}: {problem}" for problem in problems))


def problems_of_own(overrides: Sequence[str]) -> list[str]:
    """What is wrong with the settings of a loss that is not shipped; imports verl and the user's module."""
    config = compose(overrides)
    try:
        export_platform(config)
    except WrongMachineError as error:
        return [str(error)]
    import recipe.fspo.policy_loss  # noqa: F401  (the losses, which are tried)
    from recipe.fspo.config import unknown_scale
    from recipe.fspo.rules import problems
    from recipe.runner.launch import trial

    # A comparison of losses whose gradients differ by a factor would be one of learning rates.
    wrong = [*problems(config), *trial.problems(config)]
    return wrong or list(filter(None, [unknown_scale(config)]))
