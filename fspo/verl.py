"""The losses of :data:`fspo.losses.ALGORITHMS` in verl's registry, verl 0.5.0 to 0.9.1.

In verl's own trainers ``actor_rollout_ref.model.external_lib=fspo.verl`` has the workers import this module, which
registers each of them as a value of ``actor_rollout_ref.actor.policy_loss.loss_mode``. Without settings the documented
ones apply; verl's ``clip_ratio*`` keys are never read, because a token-level ratio bound means nothing here. A loss
whose band is measured during training raises :class:`Unmeasured` where nothing measures (:data:`recorder`).

Nothing else in the library imports this module, or verl.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import verl
from packaging.version import Version
from verl.trainer.ppo.core_algos import register_policy_loss

from fspo.losses import ALGORITHMS, resolve_settings, sequence_policy_loss
from fspo.types import BandState, SequenceLossOutput, SequenceLossSettings

_VERL: Final = Version(verl.__version__)
if Version("0.6") <= _VERL:
    from verl.workers.config import PolicyLossConfig
else:  # policy_loss has no class, and takes any key
    PolicyLossConfig = object  # type: ignore[misc, assignment]

_KEY: Final = "actor_rollout_ref.actor.policy_loss"


class Recorder(Protocol):
    """What measures beside the losses of a process: a factor on every loss, and the state of the band."""

    loss_scale: float

    def current_band_state(self) -> BandState | None:
        """That of the mini-batch in progress; None: nothing measures, ``BandState()``: no data yet."""


recorder: Recorder | None = None
"""That of this process, which this repository's trainer sets; None in any other."""


class Unmeasured(ValueError):
    """A loss needs the state of a band, and nothing has sent one to this process."""

    needs_worker = True  # of a trainer that measures: a trial of the loss elsewhere says nothing


@dataclass
class SequencePolicyLossConfig(PolicyLossConfig):
    """Settings of the losses: ``policy_loss._target_=fspo.verl.SequencePolicyLossConfig``, from verl 0.6 on.

    A field left at ``None`` takes the value of the loss that ``loss_mode`` names; :class:`SequenceLossSettings` says
    what each means.

    Raises:
        ValueError: If ``loss_mode`` is not a sequence-level loss, or a value is out of range.
    """

    loss_mode: str = "fspo"
    exponent: float | None = None
    c_low: float | None = None
    c_high: float | None = None
    drift: str | None = None
    weight: str | None = None
    grad_scale: str | None = None
    grad_multiplier: float | None = None
    s_max: float | None = None

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> SequenceLossSettings:
        """The loss library's settings: those that ``loss_mode`` names, overridden by the fields that are set."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        try:
            settings = resolve_settings(values)
        except ValueError as error:
            raise ValueError(f"{_KEY}.{error}") from None
        if settings is None:
            raise ValueError(
                f"{_KEY}.loss_mode={self.loss_mode!r} is not a sequence-level loss; choose one of "
                f"{', '.join(ALGORITHMS)}, or set _target_=verl.workers.config.PolicyLossConfig for a loss of verl's"
            )
        return settings


def unmeasured(loss_mode: str, settings: SequenceLossSettings) -> str:
    """The problem of settings that need a state where nothing measures one: the key, its value, the remedy."""
    setting, remedy = f"drift={settings.drift}", "leave it out"
    if ALGORITHMS[loss_mode].needs_state:
        setting, remedy = f"loss_mode={loss_mode}", "give loss_mode=fspo"
    what = "needs a band that is measured during training, and nothing here measures it"
    remedy += ", or train with this recipe's trainer, which does: trainer.v1.trainer_mode=fspo in verl 0.9.1"
    return f"{_KEY}.{setting} {what}: {remedy}"


def mean_over_mini_batch(output: SequenceLossOutput, config: Any) -> tuple[Any, ...]:
    """What a loss returns to verl: its mean over the whole mini-batch, and metrics of the micro-batch.

    The metrics have verl's usual names, and verl averages them unweighted. Before 0.6.1 verl wants three numbers in
    their place. ``config`` is verl's configuration of the actor; verl averages gradients over ranks.
    """
    # The engines, from 0.7 on, sum the micro-batches of the mini-batch whose size they give. The actors before them
    # give none, and weigh the mean of each micro-batch by its share of the rows.
    if info := getattr(config, "global_batch_info", None):
        value = output.loss_B.sum() / info["global_batch_size"] * info["dp_size"]
    else:
        value = output.loss_B.mean()
    if recorder is not None:
        value = value * recorder.loss_scale
    count, low = output.valid_B.sum().clamp(min=1), output.clipped_low_B.sum()
    removed = (output.clipped_high_B.sum() + low) / count
    kl = -output.log_ratio_B.sum() / output.length_B.sum().clamp(min=1)
    if Version("0.6.1") > _VERL:
        return value, removed, kl, low / count
    outside = (output.valid_B.sum() - output.accepted_B.sum()) / count
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/seq_outside_band")
    return value, dict(zip(names, torch.stack([removed, kl, outside]).tolist(), strict=True))


def policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **_: Any,  # verl once broke every custom loss by adding a keyword argument
) -> tuple[Any, ...]:
    """The loss that ``config.policy_loss`` names, as verl calls it; ``loss_agg_mode`` is not read.

    Raises:
        Unmeasured: If its band is measured during training, and nothing here measures it.
    """
    state = None if recorder is None else recorder.current_band_state()
    settings = resolve_settings(config.policy_loss) or ALGORITHMS[config.policy_loss.loss_mode]
    if state is None and settings.needs_state:  # a trainer that measures sends BandState() before it has data
        raise Unmeasured(unmeasured(config.policy_loss.loss_mode, settings))
    tensors = (log_prob, old_log_prob, advantages, response_mask)
    return mean_over_mini_batch(sequence_policy_loss(*tensors, settings, state, rollout_is_weights), config)


for _name in ALGORITHMS:
    register_policy_loss(_name)(policy_loss)
