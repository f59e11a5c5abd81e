"""What a loss does by length: normalisation, what it keeps of drawn responses, and how these are drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_check_loss_checks import of_library

from fspo.check_loss.call import Config, PolicyLoss
from fspo.check_loss.length_bias import LENGTHS, clip_by_length, normalisation, synthetic, weight_and_bound
from fspo.check_loss.token_kinds import TokenKinds
from fspo.fairness.lre import plain_lre
from fspo.length_bins import FINE_LENGTH_EDGES
from fspo.losses import ALGORITHMS, sequence_log_ratio, sequence_policy_loss
from fspo.responses import VIEWS, Responses


def policy_loss(function: Any) -> PolicyLoss:
    return PolicyLoss(function, Config(global_batch_info={}))


@pytest.mark.parametrize(("name", "exponent"), [("fspo", 0.0), ("seq_gspo", -1.0), ("luspo", 0.0)])
def test_normalisation(name: str, exponent: float) -> None:
    per_token, fitted = normalisation(policy_loss(of_library(name)))
    assert fitted == pytest.approx(exponent, abs=1e-9)
    assert per_token == pytest.approx([length**exponent for length in LENGTHS])


def by_blocks(size: int, d_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """exp of the mean of each block of ``size`` tokens."""
    return torch.cat([block.mean(-1, keepdim=True).expand_as(block) for block in d_BT.split(size, -1)], -1).exp()


@pytest.mark.parametrize(
    ("weigh", "weight"),
    [
        (lambda d, mask: d.exp(), ("token", "")),
        (lambda d, mask: d.exp().clamp(max=1), ("token", ", at most 1")),
        (lambda d, mask: d.exp().clamp(min=1), ("token", ", at least 1")),
        (lambda d, mask: d.sum(-1, keepdim=True).exp().clamp(max=1), ("sequence", ", at most 1")),
        (lambda d, mask: (-d).sum(-1, keepdim=True).exp(), (None, "")),
        (lambda d, mask: (2 * d).sum(-1, keepdim=True).exp(), (None, "")),
        (lambda d, mask: (2 * d / mask.sum(-1, keepdim=True)).sum(-1, keepdim=True).exp(), (None, "")),
        (lambda d, mask: d.mul(0.5).exp(), (None, "")),
        (lambda d, mask: torch.ones_like(d), ("none", "")),
        (lambda d, mask: d.exp().amax(-1, keepdim=True), (None, "")),
        (lambda d, mask: d.cumsum(-1).exp(), ("prefix", "")),
        (lambda d, mask: (d.sum() / mask.sum()).exp(), (None, "")),
        *((partial(by_blocks, size), (None, "")) for size in (2, 4, 8, 16, 32)),
        (lambda d, mask: (d.sum(-1, keepdim=True) - d.sum(-1).mean()).exp(), (None, "")),
    ],
)
def test_a_weight_is_named_rightly_or_not_at_all(weigh: Any, weight: tuple[str | None, str]) -> None:
    def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **_: Any) -> Any:
        d_BT = (log_prob - old_log_prob).masked_fill(~response_mask, 0.0)
        return -(advantages * weigh(d_BT, response_mask).detach() * log_prob * response_mask).sum()

    assert weight_and_bound(policy_loss(loss)) == weight


def test_a_mask_as_narrow_as_the_ones_in_use_hides_no_weight() -> None:
    def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **_: Any) -> Any:
        d_BT = (log_prob - old_log_prob).masked_fill(~response_mask, 0.0)
        kept_B1 = d_BT.mean(-1, keepdim=True).abs() < 1e-4
        return -(advantages * d_BT.exp() * kept_B1.detach()).sum()

    assert weight_and_bound(policy_loss(loss)) == ("token", "")


def test_a_weight_that_depends_on_the_sign_of_a_is_another() -> None:
    def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **_: Any) -> Any:
        weight_BT = torch.where(advantages > 0, 1.0, (log_prob - old_log_prob).exp())
        return -(advantages * weight_BT.detach() * log_prob * response_mask).sum()

    assert weight_and_bound(policy_loss(loss)) == (None, "")


def test_what_a_band_keeps_is_its_acceptance() -> None:
    samples = synthetic(0.03)[:10]
    clip = clip_by_length(policy_loss(of_library("seq_rloo")), "sequence", samples)
    outputs = [
        sequence_policy_loss(
            batch.log_prob_BT, batch.old_log_prob_BT, batch.advantages_BT, batch.mask_BT, ALGORITHMS["seq_rloo"]
        )
        for batch in samples
    ]
    responses = Responses.join([Responses.of_output(output) for output in outputs])
    starts = np.searchsorted(FINE_LENGTH_EDGES, clip.starts)
    for view in VIEWS:
        accepted, total = (counts.sum(0) for counts in responses.counts(view, starts))
        assert clip.errors[view].lre == pytest.approx(float(plain_lre(accepted, total)[0]), abs=1e-5)
    removed = sum(int((output.clipped_high_B | output.clipped_low_B).sum()) for output in outputs)
    assert clip.kept == pytest.approx(1 - removed / 1280, abs=1e-6)
    assert clip.kept_J[0] > clip.kept_J[-1] + 0.1  # a constant band rejects long responses


KINDS = TokenKinds.random(0.03, np.random.default_rng(0))
UP, DOWN = np.log(KINDS.q_J / KINDS.p_J), np.log((1 - KINDS.q_J) / (1 - KINDS.p_J))
#: Of one token's log-ratio, exactly: KL(pi_old || pi), which is minus its mean, and its standard deviation.
KL = -float(np.mean(KINDS.p_J * UP + (1 - KINDS.p_J) * DOWN))
SIGMA = float(np.mean(KINDS.p_J * UP**2 + (1 - KINDS.p_J) * DOWN**2) - KL**2) ** 0.5


@pytest.mark.parametrize("length", [1, 30, 500])
def test_identity_drift_and_dispersion_of_samples(length: int) -> None:
    assert pytest.approx(0.03, rel=0.02) == SIGMA and pytest.approx(SIGMA**2 / 2, rel=0.02) == KL
    n = 4000
    log_prob, old, mask = KINDS.log_probs(np.full(n, length), length + 8, np.random.default_rng(length))
    assert mask.sum(-1).tolist() == [length] * n
    S = sequence_log_ratio(log_prob, old, mask).numpy()
    assert abs(S.mean() + length * KL) < 4 * S.std() / n**0.5
    assert S.std() == pytest.approx(SIGMA * length**0.5, rel=0.06)
    assert abs(np.exp(S).mean() - 1) < 4 * np.exp(S).std() / n**0.5
