"""``vespo`` and ``ctpo_la`` in verl's registry, with typed settings: losses as docs/extending.md describes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.workers.config import PolicyLossConfig

from fspo.relatives import CtpoSettings, VespoSettings, ctpo_la_loss, vespo_loss
from fspo.types import SequenceLossOutput
from recipe.fspo.policy_loss import LossAndMetrics, mean_over_mini_batch
from recipe.fspo.recorder import RECORDER

Settings = VespoSettings | CtpoSettings


def _settings(config: Any, cls: type[Settings]) -> Any:
    """The library's settings from those of the configuration; the defaults with plain verl."""
    given = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(cls) if hasattr(config, field.name)
    }
    return cls(**given)


@dataclass
class VespoLossConfig(PolicyLossConfig):
    """Settings of ``vespo``; see :class:`fspo.relatives.VespoSettings`."""

    loss_mode: str = "vespo"
    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    grad_scale: str = "1"
    grad_multiplier: float = 1.0
    band: str = "none: a weight phi(exp S) that falls off on both sides of S = 0"

    def __post_init__(self) -> None:
        _settings(self, VespoSettings)


@dataclass
class CtpoLossConfig(PolicyLossConfig):
    """Settings of ``ctpo_la``; see :class:`fspo.relatives.CtpoSettings`."""

    loss_mode: str = "ctpo_la"
    clip_low: float = 0.025
    clip_high: float = 0.05
    clip_dual: float = 0.05
    power: float = 0.5
    grad_scale: str = "1"
    grad_multiplier: float = 1.0
    band: str = "-clip_low t^power .. clip_high t^power on the log-ratio of the first t tokens"

    def __post_init__(self) -> None:
        _settings(self, CtpoSettings)


def _register(name: str, cls: type[Settings], library_loss: Callable[..., SequenceLossOutput]) -> None:
    @register_policy_loss(name)
    def policy_loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
        **_: Any,
    ) -> LossAndMetrics:
        settings = _settings(config.policy_loss, cls)
        output = library_loss(log_prob, old_log_prob, advantages, response_mask, settings, rollout_is_weights)
        RECORDER.add(output, response_mask)
        with torch.no_grad():
            count = output.valid_B.sum().clamp(min=1)
            lost = (output.clipped_high_B + output.clipped_low_B).sum() / count
            kl = -output.log_ratio_B.sum() / output.length_B.sum().clamp(min=1)
        loss = mean_over_mini_batch(output.loss_B, output.valid_B, config.global_batch_info)
        return loss, {"actor/pg_clipfrac": float(lost), "actor/ppo_kl": float(kl)}

    policy_loss.__doc__ = f"{name}: mean over sequences of :func:`fspo.relatives.{library_loss.__name__}`."


_register("vespo", VespoSettings, vespo_loss)
_register("ctpo_la", CtpoSettings, ctpo_la_loss)
