"""Random batches, and what a loss of the family makes of them."""

from __future__ import annotations

from typing import Any

import torch

from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.responses import Responses, rows_of
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


def loss_output(rows: int, width: int = 64, **options: Any) -> SequenceLossOutput:
    """Of a random batch."""
    return sequence_policy_loss(*random_batch(rows, width, **options), ALGORITHMS["fspo"])


def responses_of(*outputs: SequenceLossOutput, first_number: int = 0) -> Responses:
    """Mini-batches of a rollout batch in order, numbered from ``first_number``."""
    parts = []
    for index, output in enumerate(outputs):
        parts.append(Responses.of_rows(rows_of(output) | {"update": index, "minibatch": index + first_number}))
    return Responses.join(parts)
