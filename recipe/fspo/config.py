"""Typed settings of the sequence-level losses, as verl instantiates them from ``actor.policy_loss._target_``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from verl.workers.config import PolicyLossConfig

from fspo.losses import ALGORITHMS
from fspo.types import SequenceLossSettings

_SETTINGS = tuple(field.name for field in dataclasses.fields(SequenceLossSettings))


@dataclass
class SequencePolicyLossConfig(PolicyLossConfig):
    """Settings of ``fspo``, ``seq_rloo``, ``seq_gspo`` and their relatives.

    A field left at ``None`` takes the value of the loss that ``loss_mode`` names (:data:`fspo.losses.ALGORITHMS`); the
    meaning, unit and range of each is documented at :class:`fspo.types.SequenceLossSettings`.

    Raises:
        ValueError: if ``loss_mode`` is not a sequence-level loss, or a value is out of range or contradicts another;
            the message names the key, the value and what to set instead.
    """

    loss_mode: str = "fspo"
    band: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    drift: str | None = None
    weight: str | None = None
    grad_scale: str | None = None
    grad_multiplier: float | None = None
    dual_clip: float | None = None
    s_max: float | None = None
    target_acceptance: float | None = None

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> SequenceLossSettings:
        """The loss library's settings: those that ``loss_mode`` names, overridden by the fields that are set."""
        if self.loss_mode not in ALGORITHMS:
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={self.loss_mode!r} is not a sequence-level loss; choose "
                f"one of {', '.join(ALGORITHMS)}, or remove _target_ to use one of verl's own losses"
            )
        chosen = {name: getattr(self, name) for name in _SETTINGS if getattr(self, name) is not None}
        try:
            return dataclasses.replace(ALGORITHMS[self.loss_mode], **chosen)
        except ValueError as error:
            raise ValueError(f"actor_rollout_ref.actor.policy_loss.{error}") from None
