"""The share of its weight that a sequence keeps; of a clip of tokens: tests/promises/test_rows.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from batches import random_batch

from fspo.kept import Gradient, kept_output
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import BandState


def gradient_of(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Gradient:
    def gradient(log_prob_BT: torch.Tensor, advantages_BT: torch.Tensor) -> torch.Tensor:
        leaf_BT = log_prob_BT.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf_BT, advantages_BT).sum(), leaf_BT)[0]

    return gradient


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_it_is_acceptance_where_a_loss_accepts_or_rejects(name: str) -> None:
    new, old, advantage, mask = random_batch(200, 30)
    settings, state = ALGORITHMS[name], BandState()

    def loss(log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return sequence_policy_loss(log_prob, old, advantages, mask, settings, state).loss_B

    expected = sequence_policy_loss(new, old, advantage, mask, settings, state)
    weight = "sequence" if settings.weight == "sequence" else "length_normalised"
    actual = kept_output(gradient_of(loss), new, old, advantage, mask, weight)
    for field in ("accepted_B", "clipped_high_B", "clipped_low_B", "log_ratio_B", "length_B", "advantage_B"):
        torch.testing.assert_close(getattr(actual, field), getattr(expected, field).to(getattr(actual, field).dtype))
    torch.testing.assert_close(actual.weight_B[actual.valid_B], expected.weight_B[actual.valid_B])
    assert torch.equal(actual.valid_B, expected.valid_B)
    assert expected.clipped_high_B.any() and expected.clipped_low_B.any()


def test_what_is_raised_is_kept_and_what_turns_round_is_lost() -> None:
    old, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    new = torch.tensor([[0.5, 1.5]], dtype=torch.float64).log()
    one = torch.ones(1, 2, dtype=torch.float64)

    def cispo(log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -log_prob.exp().clamp(0.8, 1.2).detach() * advantages * log_prob

    def turning(log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -advantages * (log_prob - 2 * log_prob.square())  # gradient -A (1 - 4 d)

    kept = 1 - kept_output(gradient_of(cispo), new, old, one, mask, "token").clipped_high_B
    torch.testing.assert_close(kept, torch.tensor([(0.5 + 1.2) / 2.0], dtype=torch.float64))
    kept = 1 - kept_output(gradient_of(turning), new, old, one, mask, "none").clipped_high_B
    torch.testing.assert_close(kept, torch.tensor([0.5], dtype=torch.float64))  # d = log 1.5: 1 - 4 d < 0


def test_what_has_nothing_to_lose_keeps_all() -> None:
    new, old, advantage, mask = random_batch(20, 30)
    output = kept_output(gradient_of(lambda x, a: (-a * x) * 0), new, old, advantage, mask, "token")
    assert torch.equal(output.accepted_B, output.valid_B.double())
    assert not output.clipped_high_B.any() and not output.clipped_low_B.any() and bool((~output.valid_B).any())
