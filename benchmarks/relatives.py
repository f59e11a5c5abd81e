"""VESPO and CTPO-LA: losses that people compare FSPO with, and whose clip is not a band on S.

Both are written from their authors' public code and the abstracts of their papers; what differs from that code is said
at each. They share their checks and diagnostics with :func:`fspo.losses.sequence_policy_loss`. Where a sequence is
neither accepted nor rejected, ``accepted_B`` and the ``clipped_*_B`` are shares of its weight (:mod:`fspo.acceptance`).

They are losses of one's own as docs/extending.md describes them: registered under their names, with classes of settings
that ``actor.policy_loss._target_`` names.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final, get_args

import torch
from verl.workers.config import PolicyLossConfig

from fspo.losses import sequence_policy_loss
from fspo.types import GradScale, SequenceLossOutput, SequenceLossSettings
from recipe.fspo.policy_loss import register

#: A band that is never left, and VESPO's own clamp of S.
_UNCLIPPED: Final = SequenceLossSettings(c_low=1e30, c_high=1e30, s_max=20.0)
#: The largest log-weight of a prefix, as in the authors' code.
_LARGEST_PREFIX: Final = 10.0


def _check(settings: VespoSettings | CtpoSettings, cls: type[VespoSettings | CtpoSettings]) -> None:
    if settings.grad_scale not in get_args(GradScale):
        raise ValueError(f"grad_scale={settings.grad_scale!r} is not known; choose '1' or '1/L'")
    for field in dataclasses.fields(cls):  # those of the library, not what a configuration adds
        value = getattr(settings, field.name)
        if field.name != "grad_scale" and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"{field.name}={value!r} must be a finite number > 0")


@dataclass  # not frozen, because verl's class, which its configuration extends too, is not
class VespoSettings:
    """Settings of VESPO (arXiv 2602.10693); the defaults are those of the authors' code.

    Attributes:
        k_pos, lambda_pos: k and lambda of phi(w) = exp(lambda) w^k exp(-lambda w) where A >= 0.
        k_neg, lambda_neg: The same where A < 0.
        grad_scale: h(L): ``"1"``, a sum over tokens, or ``"1/L"``.
        grad_multiplier: A constant factor on loss and gradient.

    Raises:
        ValueError: If a value is out of range; the message names it.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    grad_scale: GradScale = "1"
    grad_multiplier: float = 1.0

    def __post_init__(self) -> None:
        _check(self, VespoSettings)


@dataclass
class CtpoSettings:
    """Settings of CTPO-LA (arXiv 2605.07331); the defaults are those of the authors' code.

    Attributes:
        clip_low, clip_high: c in nats per sqrt(token): the log-ratio of the prefix of t tokens is clipped to
            ``[-clip_low t^power, clip_high t^power]``.
        clip_dual: For A < 0 the gradient is removed above ``clip_dual t^power``.
        power: Exponent of the position t.
        grad_scale, grad_multiplier: As in :class:`VespoSettings`.

    Raises:
        ValueError: If a value is out of range; the message names it.
    """

    clip_low: float = 0.025
    clip_high: float = 0.05
    clip_dual: float = 0.05
    power: float = 0.5
    grad_scale: GradScale = "1"
    grad_multiplier: float = 1.0

    def __post_init__(self) -> None:
        _check(self, CtpoSettings)


def vespo_loss(
    log_prob_BT: torch.Tensor,
    old_log_prob_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    settings: VespoSettings,
    rollout_is_weights_BT: torch.Tensor | None = None,
) -> SequenceLossOutput:
    r"""VESPO: the gradient of a sequence is weighed by phi(w), a soft bump, in place of w = exp(S).

    .. math::
        \phi(w) = e^{\lambda} w^k e^{-\lambda w},\qquad
        \partial\,\text{loss} / \partial \log\pi(y_t) = -h\,A\,\phi(w v)

    phi(1) = 1. v is the rollout correction, inside phi as in the authors' code. S is clamped to 20 from above, as
    there. Different from it: the mean over the mini-batch is the caller's (theirs is over the micro-batch), and the
    value of the loss is -h A phi(w), theirs -h A phi(w) log pi.

    Args and raises: as in :func:`fspo.losses.sequence_policy_loss`.

    Returns:
        Kept is min(phi(w) / w, 1), with k and lambda of the sign of A.
    """
    plain = dataclasses.replace(_UNCLIPPED, grad_scale=settings.grad_scale, grad_multiplier=settings.grad_multiplier)
    output = sequence_policy_loss(
        log_prob_BT, old_log_prob_BT, advantages_BT, response_mask_BT, plain, None, rollout_is_weights_BT
    )
    with torch.no_grad():
        log_x_B = output.log_ratio_B.clamp(-_UNCLIPPED.s_max, _UNCLIPPED.s_max)  # x = w v
        if rollout_is_weights_BT is not None:  # constant over a sequence, which was checked above
            weights_BT = rollout_is_weights_BT.to(log_x_B.dtype).masked_fill(~response_mask_BT.to(torch.bool), 0.0)
            v_B = weights_BT.sum(-1) / output.length_B.clamp(min=1)
            log_x_B = (log_x_B + v_B.clamp(min=1e-8).log()).clamp(max=_UNCLIPPED.s_max)

        def relative(k: float, rate: float) -> torch.Tensor:
            """phi(x) / x."""
            return (rate + (k - 1) * log_x_B - rate * log_x_B.exp()).exp()

        plus_B = relative(settings.k_pos, settings.lambda_pos)
        minus_B = relative(settings.k_neg, settings.lambda_neg)
        negative_B = output.advantage_B < 0
        factor_B = torch.where(negative_B, minus_B, plus_B)
        plus_B, minus_B = plus_B.clamp(max=1.0), minus_B.clamp(max=1.0)
    return dataclasses.replace(
        output,
        loss_B=output.loss_B * factor_B,  # without a clip it is -h A w v, in value and gradient
        accepted_B=plus_B.minimum(minus_B) * output.valid_B,
        clipped_high_B=(1 - plus_B) * (output.advantage_B > 0),
        clipped_low_B=(1 - minus_B) * negative_B,
    )


def ctpo_la_loss(
    log_prob_BT: torch.Tensor,
    old_log_prob_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    settings: CtpoSettings,
    rollout_is_weights_BT: torch.Tensor | None = None,
) -> SequenceLossOutput:
    r"""CTPO-LA: each token is weighed by the ratio of the response up to it, clipped in a band that grows with t.

    With c_t = d_1 + ... + d_t the log-ratio of the prefix (d_t clamped to 20), t counted over response tokens, p the
    power and ``upper_t = clip_high t^p``, ``lower_t = -clip_low t^p``, ``dual_t = clip_dual t^p``:

    .. math::
        \partial\,\text{loss} / \partial \log\pi(y_t) = -v\,h\,A\,e^{c_t}

    and 0 where c_t > upper_t with A > 0, c_t < lower_t with A < 0, c_t > dual_t with A < 0, or c_t > 10. The ratio of
    the tokens before t is a constant, as in the authors' code. The value of the loss is the sum of the clipped
    surrogates ``max(-A e^c, -A e^clip(c))``, as there.

    Args and raises: as in :func:`fspo.losses.sequence_policy_loss`.

    Returns:
        Kept is the share of the tokens' weights exp(c_t) that the clips leave.
    """
    diagnosed = dataclasses.replace(_UNCLIPPED, grad_scale=settings.grad_scale)
    with torch.no_grad():
        output = sequence_policy_loss(
            log_prob_BT, old_log_prob_BT, advantages_BT, response_mask_BT, diagnosed, None, rollout_is_weights_BT
        )
        mask_BT = response_mask_BT.to(torch.bool)
        dtype = output.log_ratio_B.dtype
        d_BT = (log_prob_BT.to(dtype) - old_log_prob_BT).masked_fill(~mask_BT, 0.0).clamp(-20.0, 20.0)
        c_BT = d_BT.cumsum(dim=-1)
        scale_BT = mask_BT.cumsum(dim=-1).clamp(min=1).to(dtype).pow(settings.power)
        advantage_B1 = output.advantage_B[:, None]
        overflow_BT = c_BT > _LARGEST_PREFIX
        removed_plus_BT = overflow_BT | (c_BT > settings.clip_high * scale_BT)
        removed_minus_BT = overflow_BT | (c_BT < -settings.clip_low * scale_BT) | (c_BT > settings.clip_dual * scale_BT)
        weight_BT = c_BT.clamp(max=_LARGEST_PREFIX).exp() * mask_BT
        removed_BT = torch.where(advantage_B1 < 0, removed_minus_BT, removed_plus_BT)
        # The surrogate: clamped from above for A > 0, from both sides for A < 0.
        high_BT = torch.where(advantage_B1 < 0, settings.clip_dual, settings.clip_high) * scale_BT
        clipped_BT = torch.where(advantage_B1 < 0, c_BT.clamp(min=-settings.clip_low * scale_BT), c_BT)
        clipped_BT = clipped_BT.minimum(high_BT).clamp(max=_LARGEST_PREFIX)
        factor_B1 = -settings.grad_multiplier * advantage_B1
        if settings.grad_scale == "1/L":
            factor_B1 = factor_B1 / output.length_B.clamp(min=1)[:, None]
        value_BT = factor_B1 * clipped_BT.exp() * mask_BT
        slope_BT = (factor_B1 * weight_BT).masked_fill(removed_BT, 0.0)
        if rollout_is_weights_BT is not None:
            v_BT = rollout_is_weights_BT.to(dtype).masked_fill(~mask_BT, 0.0)
            value_BT, slope_BT = value_BT * v_BT, slope_BT * v_BT
        whole_B = weight_BT.sum(-1)

        def kept(removed_BT: torch.Tensor) -> torch.Tensor:
            left_B = weight_BT.masked_fill(removed_BT, 0.0).sum(-1)
            return torch.where(whole_B > 0, left_B / whole_B, 1.0)

        plus_B, minus_B = kept(removed_plus_BT), kept(removed_minus_BT)
    live_BT = log_prob_BT.to(dtype).masked_fill(~mask_BT, 0.0)
    return dataclasses.replace(
        output,
        loss_B=value_BT.sum(-1) + (slope_BT * (live_BT - live_BT.detach())).sum(-1),
        weight_B=torch.where(output.valid_B, whole_B / output.length_B.clamp(min=1), 1.0),
        accepted_B=kept(removed_plus_BT | removed_minus_BT) * output.valid_B,
        clipped_high_B=(1 - plus_B) * (output.advantage_B > 0),
        clipped_low_B=(1 - minus_B) * (output.advantage_B < 0),
        overflow_B=(overflow_BT & mask_BT).any(-1),
    )


@dataclass
class VespoLossConfig(VespoSettings, PolicyLossConfig):
    """Settings of ``vespo``, for ``_target_``."""

    loss_mode: str = "vespo"
    band: str = "none: a weight phi(exp S) that falls off on both sides of S = 0"


@dataclass
class CtpoLossConfig(CtpoSettings, PolicyLossConfig):
    """Settings of ``ctpo_la``, for ``_target_``."""

    loss_mode: str = "ctpo_la"
    band: str = "-clip_low t^power .. clip_high t^power on the log-ratio of the first t tokens"


def _settings(configured: Any, cls: type[VespoSettings | CtpoSettings]) -> Any:
    """The settings of the configuration; the defaults with verl's class, which has none of them."""
    return configured if isinstance(configured, cls) else cls()


register("vespo", lambda tensors, loss, weights: vespo_loss(*tensors, _settings(loss, VespoSettings), weights))
register("ctpo_la", lambda tensors, loss, weights: ctpo_la_loss(*tensors, _settings(loss, CtpoSettings), weights))

#: ``actor.policy_loss`` of each, as a command would give it.
POLICY_LOSSES: Final[dict[str, dict[str, Any]]] = {
    "vespo": {"_target_": "benchmarks.relatives.VespoLossConfig", "loss_mode": "vespo"}
    | {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "ctpo_la": {"_target_": "benchmarks.relatives.CtpoLossConfig", "loss_mode": "ctpo_la"}
    | {"clip_low": 0.025, "clip_high": 0.05, "clip_dual": 0.05, "power": 0.5},
}
