"""Micro-batches for an audit, and a loop over them as anyone writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from batches import random_batch

from fspo.audit import Audit
from fspo.losses import ALGORITHMS

RANKS, STEPS, MINI_BATCHES = 2, 2, 3
GSPO = ALGORITHMS["seq_gspo"]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def micro_batch(seed: int, moved: bool = True) -> Tensors:
    """log_prob, old_log_prob, mask, one advantage per sequence."""
    new, old, advantage, mask = random_batch(16, 64, seed=seed, scale=3e-3 * moved)
    return new, old, mask, advantage[:, 0]


def train(folder: Path, run: str = "run", ranks: range = range(RANKS)) -> None:
    """A loop as anyone writes it."""
    for rank in ranks:
        audit = Audit(folder, GSPO, loss="seq_gspo", rank=rank, ranks=RANKS, run=run)
        for step in range(STEPS):
            for mini_batch in range(MINI_BATCHES):
                for micro in range(2):
                    audit.add(*micro_batch(1000 * rank + 100 * step + 10 * mini_batch + micro, mini_batch > 0))
                audit.end_mini_batch(step)
