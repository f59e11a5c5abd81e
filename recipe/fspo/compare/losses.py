"""What a loss must be for its clip values to be matched."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf
from recipe.fspo.job import compose
from recipe.runner.launch.commands import BadInput

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
