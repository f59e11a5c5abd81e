"""Random responses, and the losses of the family written straight from their formulas."""

from __future__ import annotations

import math

import torch
from library import SequenceLossSettings

F64 = torch.float64
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def batch(seed: int = 0, rows: int = 64, width: int = 50, scale: float = 0.06, dtype: torch.dtype = F64) -> Inputs:
    """New and old log-probabilities, A and mask of lengths 0 to ``width`` with holes, on both sides of every band."""
    random = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=random, dtype=F64)
    new = old + scale * torch.randn(rows, width, generator=random, dtype=F64)
    new = new + scale * torch.randn(rows, 1, generator=random, dtype=F64) / width**0.5
    length = torch.randint(0, width + 1, (rows, 1), generator=random)
    mask = (torch.arange(width) < length) & (torch.rand(rows, width, generator=random) < 0.9)
    advantages = torch.randn(rows, 1, generator=random, dtype=F64) * mask
    return new.to(dtype), old.to(dtype), advantages.to(dtype), mask


def formula(inputs: Inputs, loss: SequenceLossSettings, drift: float, rollout_weight: torch.Tensor) -> torch.Tensor:
    """``max(-A w, -A clip(w))`` response by response, under autograd; it shares no code with the program."""
    new, old, advantages, mask = inputs
    values = []
    for i in range(len(new)):
        tokens = mask[i].nonzero().flatten()
        length, S = len(tokens), (new[i, tokens] - old[i, tokens]).sum()
        if length == 0:
            values.append(S)
            continue
        A = advantages[i, tokens[0]]
        centre = -length * drift if loss.drift == "kl" else 0.0
        growth = math.exp(loss.exponent * math.log(length))
        n = length if loss.weight == "length_normalised" else 1
        low, high = ((centre - loss.c_low * growth) / n, (centre + loss.c_high * growth) / n)
        ratio = torch.exp(S / n)
        value = torch.maximum(-A * ratio, -A * torch.clamp(ratio, math.exp(low), math.exp(high)))
        h = loss.grad_multiplier * (1 / length if loss.grad_scale == "1/L" else 1.0)
        values.append(value * h * n * rollout_weight[i])
    return torch.stack(values)
