"""What a loss says of each sequence, and its behaviour on bad input. The formulas: tests/promises/test_formulas.py."""

from __future__ import annotations

import math

import pytest
import torch
from batches import random_batch
from messages import holds

from fspo.losses import ALGORITHMS, UnusableRowsError, sequence_policy_loss
from fspo.types import BandState

STATE = BandState(drift_per_token=2e-3)


@pytest.mark.parametrize(
    ("which", "value", "name"),
    [(0, -math.inf, "log_prob"), (1, math.nan, "old_log_prob"), (2, 9.0, "advantages"), (4, 9.0, "rollout_is_weights")],
)
def test_a_value_that_has_no_loss_is_named_with_its_token(which: int, value: float, name: str) -> None:
    old, mask = -torch.ones(8, 50), torch.ones(8, 50, dtype=torch.bool)
    arguments = [old, old, torch.ones(8, 50), mask, torch.ones(8, 50)]
    arguments[which] = arguments[which].clone()
    arguments[which][5, 2] = value
    with pytest.raises(UnusableRowsError, match=rf"row 5 .*: {name}_BT is {value:g} at response token 2 "):
        sequence_policy_loss(*arguments[:4], ALGORITHMS["fspo"], None, arguments[4])


def test_a_sum_that_overflows_and_other_shapes_are_refused_too() -> None:
    log_prob, old, advantages, mask = random_batch(64, 50, shortest=1)
    with pytest.raises(UnusableRowsError, match=r"row 0 .*overflows"):
        sequence_policy_loss(torch.full((1, 2), -3e38), *torch.ones(3, 1, 2), ALGORITHMS["fspo"])
    for wrong, shape in ((advantages[:, 0], "(64,)"), (advantages[:, 1:], "(64, 49)")):
        with pytest.raises(ValueError, match=holds("advantages_BT", shape, "(64, 50)", "expand_as", "slice")):
            sequence_policy_loss(log_prob, old, wrong, mask, ALGORITHMS["fspo"])
    with pytest.raises(ValueError, match=holds("log_prob_BT", "(50,)", "from_packed")):
        sequence_policy_loss(log_prob[0], old[0], advantages[0], mask[0], ALGORITHMS["fspo"])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_to_learn_from_is_zero_loss_and_zero_gradient(shape: tuple[int, int], name: str) -> None:
    log_prob, nothing = torch.full(shape, math.nan, requires_grad=True), torch.zeros(shape, dtype=torch.bool)
    output = sequence_policy_loss(log_prob, *[log_prob.detach()] * 2, nothing, ALGORITHMS[name], STATE)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
    assert torch.equal(gradient, torch.zeros(shape)) and torch.equal(output.loss_B, torch.zeros(shape[0]))
    assert not bool((output.valid_B | output.accepted_B | output.overflow_B).any())
