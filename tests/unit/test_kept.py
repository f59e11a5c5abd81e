"""What a sequence keeps where a loss removes more, or less, than a clip: of clips, tests/promises/test_rows.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import random_batch

from fspo.kept import UnclippedWeight, kept_output

F64 = torch.float64


def cispo(log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -log_prob.exp().clamp(0.8, 1.2).detach() * advantages * log_prob


def turning(log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -advantages * (log_prob - 2 * log_prob.square())  # gradient -A (1 - 4 d)


def kept(loss: Any, *inputs: Any) -> Any:
    def gradient(log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        leaf = log_prob.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf, advantages).sum(), leaf)[0]

    return kept_output(gradient, *inputs)


@pytest.mark.parametrize(
    ("loss", "weight", "share", "mean_weight"),
    [
        (cispo, "token", (0.5 + 1.2) / 2, 1),
        (turning, "none", 0.5, 1),  # d = log 1.5: 1 - 4 d < 0
        (lambda d, a: -a * d.mean(-1, keepdim=True).exp(), "length_normalised", 1, 0.75**0.5),
        (lambda d, a: -a * d.sum(-1, keepdim=True).exp(), "sequence", 1, 0.75),
        (lambda d, a: -a * d.cumsum(-1).exp(), "prefix", 1, (0.5 + 0.75) / 2),
    ],
)
def test_what_is_raised_is_kept_and_what_turns_round_is_lost(
    loss: Any, weight: UnclippedWeight, share: float, mean_weight: float
) -> None:
    one, new = torch.ones(1, 2, dtype=F64), torch.tensor([[0.5, 1.5]], dtype=F64).log()
    output = kept(loss, new, torch.zeros_like(one), one, one.bool(), weight)
    assert (1 - float(output.clipped_high_B), float(output.weight_B)) == pytest.approx((share, mean_weight))


def test_what_has_nothing_to_lose_keeps_all() -> None:
    output = kept(lambda x, a: (-a * x) * 0, *random_batch(20, 30), "token")
    assert torch.equal(output.accepted_B, output.valid_B.double())
    assert not output.clipped_high_B.any() and not output.clipped_low_B.any() and bool((~output.valid_B).any())
