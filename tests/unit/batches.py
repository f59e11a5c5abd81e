"""Random batches, and what a loss of the family makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
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


def loss_output(
    rows: int, width: int = 64, *, algo: str = "fspo", seed: int = 0, scale: float = 0.04, shortest: int = 0
) -> SequenceLossOutput:
    """Of a random batch."""
    return sequence_policy_loss(*random_batch(rows, width, seed=seed, scale=scale, shortest=shortest), ALGORITHMS[algo])


def responses_of(
    *outputs: SequenceLossOutput, truncated: int | None = None, first_number: int = 0, step: int = 1
) -> Responses:
    """Mini-batches of a rollout batch in order, numbered from ``first_number``; cut from so many tokens on."""
    parts = []
    for index, output in enumerate(outputs):
        part = Responses.of_rows(rows_of(output) | {"update": index, "minibatch": index + first_number})
        cut_B = np.full(len(part), np.nan) if truncated is None else (part.length_B >= truncated).astype(float)
        parts.append(dataclasses.replace(part, truncated_B=cut_B, step_B=np.full(len(part), step)))
    return Responses.join(parts)


#: Tokens of a prompt of :func:`batch_of`.
PROMPT = 4


def batch_of(rows: Sequence[torch.Tensor]) -> Any:
    """What the trainer gives a worker: prompts of four tokens, responses, advantages 1 and -1 in turn."""
    from tensordict import TensorDict

    rows = [row.cpu() for row in rows]
    masks = [torch.ones(len(row) - PROMPT, dtype=torch.int64) for row in rows]
    columns = {
        "prompts": [row[:PROMPT] for row in rows],
        "responses": [row[PROMPT:] for row in rows],
        "input_ids": list(rows),
        "position_ids": [torch.arange(len(row)) for row in rows],
        "response_mask": masks,
        "loss_mask": [mask.clone() for mask in masks],
        "advantages": [(1.0 - 2.0 * (i % 2)) * mask.float() for i, mask in enumerate(masks)],
    }
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()}
    return TensorDict(nested, batch_size=len(rows))
