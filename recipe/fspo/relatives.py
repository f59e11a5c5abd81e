"""``vespo`` and ``ctpo_la`` in verl's registry, with typed settings: losses as docs/extending.md describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipe.fspo.policy_loss import register

from fspo.relatives import CtpoSettings, VespoSettings, ctpo_la_loss, vespo_loss
from verl.workers.config import PolicyLossConfig


@dataclass
class VespoLossConfig(VespoSettings, PolicyLossConfig):
    """Settings of ``vespo``."""

    loss_mode: str = "vespo"
    band: str = "none: a weight phi(exp S) that falls off on both sides of S = 0"


@dataclass
class CtpoLossConfig(CtpoSettings, PolicyLossConfig):
    """Settings of ``ctpo_la``."""

    loss_mode: str = "ctpo_la"
    band: str = "-clip_low t^power .. clip_high t^power on the log-ratio of the first t tokens"


def _settings(given: Any, cls: type[VespoSettings | CtpoSettings]) -> Any:
    """The settings of the configuration; the defaults with plain verl, whose class has none of them."""
    return given if isinstance(given, cls) else cls()


register("vespo", lambda tensors, given, weights: vespo_loss(*tensors, _settings(given, VespoSettings), weights))
register("ctpo_la", lambda tensors, given, weights: ctpo_la_loss(*tensors, _settings(given, CtpoSettings), weights))
