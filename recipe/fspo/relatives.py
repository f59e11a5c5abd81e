"""``vespo`` and ``ctpo_la`` in verl's registry, with typed settings: losses as docs/extending.md describes them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from verl.workers.config import PolicyLossConfig

from fspo.relatives import CtpoSettings, VespoSettings, ctpo_la_loss, vespo_loss
from recipe.fspo.policy_loss import register

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


register("vespo", lambda tensors, given, weights: vespo_loss(*tensors, _settings(given, VespoSettings), weights))
register("ctpo_la", lambda tensors, given, weights: ctpo_la_loss(*tensors, _settings(given, CtpoSettings), weights))
