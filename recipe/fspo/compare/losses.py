"""What the losses of a grid must be for the grid to compare them; said before its first run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from omegaconf import OmegaConf
from recipe.fspo.job import choices, compose
from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.machine import WrongMachineError, export_platform

from fspo.losses import resolve_settings
from fspo.types import SequenceLossSettings


def band_settings(algo: str, overrides: Sequence[str]) -> SequenceLossSettings:
    """The settings of an algorithm whose clip values can be matched.

    Raises:
        BadInput: for a loss that is not the library's.
    """
    policy_loss = compose([*overrides, f"algo={algo}"]).actor_rollout_ref.actor.policy_loss
    settings = resolve_settings(OmegaConf.to_container(policy_loss, resolve=True))
    if settings is None:
        raise BadInput(
            f"algo={algo} uses the loss {policy_loss.loss_mode!r}, and only the bands on S of this library's losses "
            "can be matched: leave it out of a matched comparison, or give comparisons=[default]"
        )
    return settings


def check(algos: Sequence[str], overrides: Sequence[str], matched: bool) -> None:
    """Raise BadInput if a loss cannot be compared as it is asked for."""
    shipped = choices("algo")
    for algo in algos:
        if matched:
            band_settings(algo, overrides)
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
    from recipe.fspo.config import problems

    return list(problems(config))
