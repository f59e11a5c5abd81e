"""Extreme inputs that leave a loss and its gradient finite. They are reported, and fail no check. Defined here."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import torch

from fspo.check_loss.call import Batch, LossError, PolicyLoss

#: Log-ratios, nats: of one token, and the sum over 400.
_TRIED: Final = {"token": (1, (1, 5, 10, 20, 40, 60, 80, 90)), "response": (400, (10, 20, 40, 80, 100, 200, 400))}


def survived(loss: PolicyLoss) -> dict[str, tuple[int, int]]:
    """Largest log-ratio, up and down, of a ``token`` and a ``response`` with a finite loss and gradient; 0 for none."""

    def largest(sign: int, length: int, sizes: tuple[int, ...]) -> int:
        lost = next((size for size in sizes if not _survives(loss, sign * size / length, length)), math.inf)
        return max((size for size in sizes if size < lost), default=0)

    return {name: (largest(1, *tried), largest(-1, *tried)) for name, tried in _TRIED.items()}


def bfloat16_error(loss: PolicyLoss) -> float:
    """Largest error of the gradient with bfloat16 log-probabilities, relative to its largest entry in float32."""
    # S is near -8, where bfloat16 has steps of 1/32 or 1/16.
    d_BT = torch.where(torch.arange(400) < 400 - 3 * torch.arange(8)[:, None], -0.0234375, -0.015625)
    batch = Batch(d_BT - 1, torch.full_like(d_BT, -1.0), torch.ones_like(d_BT), d_BT < 0)
    short_BT, long_BT = (_outcome(loss, batch.to(dtype))[0].float() for dtype in (torch.bfloat16, torch.float32))
    return float((short_BT - long_BT).abs().max() / long_BT.abs().max().clamp(min=1e-30))


def in_words(loss: PolicyLoss) -> str:
    """The results of this module, and whether NaN in the padding does harm."""
    parts = [f"{up:+g} and {-down:+g} of a {name}" for name, (up, down) in survived(loss).items()]
    most = " and ".join(str(sizes[-1]) for _, sizes in _TRIED.values())
    says = f"largest log-ratios survived: {', '.join(parts)} (tried: up to {most})"
    batch = Batch(torch.full((2, 4), -1.0), torch.full((2, 4), -1.01), torch.ones(2, 4), torch.arange(8).view(2, 4) < 6)
    if not _finite(loss, batch.padding(math.nan, math.nan, 1.0)):
        says += "; NaN in the padding reaches the loss"
    if not (error := bfloat16_error(loss)) < 0.012:  # bfloat16 itself rounds a gradient by 0.004
        off = f"{error:.1%} off" if error < math.inf else "not finite"
        says += f"; with bfloat16 the gradient is {off}: upcast before summing"
    return says


def _survives(loss: PolicyLoss, d: float, length: int) -> bool:
    old_BT = torch.full((2, length), min(-1.0, -1.0 - d))
    # The second response is ordinary: the extreme first one must not make its gradient non-finite.
    batch = Batch(torch.stack([old_BT[0] + d, old_BT[1]]), old_BT, torch.ones_like(old_BT), old_BT < 0)
    scaled = (dataclasses.replace(batch, advantages_BT=a * batch.advantages_BT) for a in (1.0, -1.0, 30.0))
    return all(_finite(loss, one.to(dtype)) for one in scaled for dtype in (torch.float32, torch.bfloat16))


def _finite(loss: PolicyLoss, batch: Batch) -> bool:
    gradient_BT, value = _outcome(loss, batch)
    return math.isfinite(value) and bool(torch.isfinite(gradient_BT).all())


def _outcome(loss: PolicyLoss, batch: Batch) -> tuple[torch.Tensor, float]:
    try:
        return loss.gradient(batch)
    except LossError:
        return torch.full_like(batch.log_prob_BT, math.nan), math.nan
