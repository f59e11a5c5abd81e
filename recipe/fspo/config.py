"""Typed settings of the sequence-level losses, as verl instantiates them from ``actor.policy_loss._target_``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf, open_dict
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
                f"actor_rollout_ref.actor.policy_loss.loss_mode={self.loss_mode!r} is not a sequence-level loss; "
                f"choose one of {', '.join(ALGORITHMS)}, or remove _target_ to use one of verl's own losses"
            )
        chosen = {name: getattr(self, name) for name in _SETTINGS if getattr(self, name) is not None}
        try:
            return dataclasses.replace(ALGORITHMS[self.loss_mode], **chosen)
        except ValueError as error:
            raise ValueError(f"actor_rollout_ref.actor.policy_loss.{error}") from None


def policy_loss_settings(policy_loss: DictConfig) -> SequenceLossSettings | None:
    """The loss library's settings for a composed ``actor.policy_loss``; None if it names one of verl's own losses.

    Without ``_target_`` (a plain verl configuration) the documented defaults of the loss apply.

    Raises:
        ValueError: for a value out of range, a contradiction or an unknown key.
    """
    if policy_loss.loss_mode not in ALGORITHMS:
        return None
    values = OmegaConf.to_container(policy_loss, resolve=True)
    if values.pop("_target_", None) != f"{SequencePolicyLossConfig.__module__}.{SequencePolicyLossConfig.__qualname__}":
        return ALGORITHMS[policy_loss.loss_mode]
    known = {field.name for field in dataclasses.fields(SequencePolicyLossConfig)} - {"_target_"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss has no key {', '.join(unknown)}; the keys are "
            f"{', '.join(sorted(known))}"
        )
    values.pop("rollout_correction", None)
    return SequencePolicyLossConfig(**values).settings()


def apply_grad_scale(config: DictConfig) -> None:
    """With ``grad_scale=matched``, divide the losses that sum over tokens by ``fspo.reference_length``, in place.

    The gradients of losses with h(L) = 1 (FSPO, RLOO, LUSPO) are about L times those of GSPO and of verl's token means,
    so a common gradient-norm clip would bind always for the ones and never for the others. Defined here.
    """
    if config.fspo.grad_scale != "matched":
        return
    settings = policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
    if settings is None or settings.grad_scale != "1":
        return
    with open_dict(config):
        config.actor_rollout_ref.actor.policy_loss.grad_multiplier = (
            settings.grad_multiplier / config.fspo.reference_length
        )
