"""Random batches, and what a loss of the family makes of them."""

from __future__ import annotations

import torch

from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import SequenceLossOutput

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_batch(rows: int, width: int, *, seed: int = 0, scale: float = 0.04, shortest: int = 0) -> Inputs:
    """New and old log-probs in float64, advantages of -1, 0 and 1, and a mask of lengths from `shortest` to `width`."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    new = old + scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.randint(shortest, width + 1, (rows, 1), generator=generator)
    advantage = torch.randint(-1, 2, (rows, 1), generator=generator).double().expand(rows, width)
    return new, old, advantage, mask


def loss_output(
    rows: int, width: int = 64, *, algo: str = "fspo", seed: int = 0, scale: float = 0.04, shortest: int = 0
) -> SequenceLossOutput:
    """Of a random batch."""
    return sequence_policy_loss(*random_batch(rows, width, seed=seed, scale=scale, shortest=shortest), ALGORITHMS[algo])
