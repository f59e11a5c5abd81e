"""Synthetic log-ratios: the martingale identity, and which bands are flat over lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.synthetic import gaussian_acceptance, sums_of_log_ratios
from fspo.check_loss.token_kinds import TokenKinds
from fspo.losses import ALGORITHMS, sequence_log_ratio
from fspo.sums import SequenceSums
from fspo.types import BandState

KINDS = TokenKinds.random(0.03, np.random.default_rng(0))


def test_dispersion_is_what_was_asked_for_and_drift_half_its_square() -> None:
    assert KINDS.sigma == pytest.approx(0.03, rel=0.02)
    assert KINDS.kl_per_token == pytest.approx(KINDS.sigma**2 / 2, rel=0.02)


@pytest.mark.parametrize("length", [1, 30, 500, 32768])
def test_identity_drift_and_dispersion_of_samples(length: int) -> None:
    rng, n = np.random.default_rng(length), 20_000
    S = KINDS.log_ratios(np.full(n, length), rng)
    assert abs(S.mean() + length * KINDS.kl_per_token) < 4 * S.std() / n**0.5
    assert S.std() == pytest.approx(KINDS.sigma * length**0.5, rel=0.03)
    if length < 1000:  # beyond, the mean of exp(S) lies in a tail that is not drawn
        assert abs(np.exp(S).mean() - 1) < 4 * np.exp(S).std() / n**0.5


def test_tokens_and_counts_give_the_same_distribution() -> None:
    lengths = np.full(2000, 40)
    log_prob, old, mask = KINDS.log_probs(lengths, 48, np.random.default_rng(1))
    S = sequence_log_ratio(log_prob, old, mask).numpy()
    counted = KINDS.log_ratios(lengths, np.random.default_rng(2))
    assert mask.sum(-1).tolist() == lengths.tolist()
    assert abs(S.mean() - counted.mean()) < 4 * (S.var() / 2000 + counted.var() / 2000) ** 0.5
    assert S.std() == pytest.approx(counted.std(), rel=0.1)


def test_only_the_sqrt_band_is_flat_and_only_with_drift() -> None:
    lengths = np.array([1, 64, 1024, 8192, 32768])
    state = BandState(drift_per_token=KINDS.kl_per_token)
    spread = {}
    for name in ("fspo", "fspo_v1", "seq_rloo", "seq_gspo"):
        rates = gaussian_acceptance(lengths, KINDS.sigma, KINDS.kl_per_token, ALGORITHMS[name], state)
        spread[name] = rates.max() - rates.min()
    assert spread["fspo_v1"] < 1e-9 and min(v for k, v in spread.items() if k != "fspo_v1") > 0.3
    fixed = ALGORITHMS["fspo"]
    sigma = 0.03  # the numbers of the text: c = sigma = 0.03, no drift correction
    rates = gaussian_acceptance(np.array([50, 8192]), sigma, sigma**2 / 2, fixed, state)
    assert rates == pytest.approx([0.68, 0.35], abs=0.005)


def test_sums_of_bare_log_ratios_are_those_of_the_loss() -> None:
    from fspo.losses import sequence_policy_loss

    log_prob, old, mask = KINDS.log_probs(np.array([3, 40, 17, 40]), 40, np.random.default_rng(3))
    output = sequence_policy_loss(log_prob, old, torch.ones_like(old), mask, ALGORITHMS["fspo"])
    full = SequenceSums.zeros().add_(output)
    bare = sums_of_log_ratios(output.log_ratio_B.numpy(), output.length_B.numpy())
    for field in ("count", "S", "z_squared", "length", "length_sqrt"):
        torch.testing.assert_close(bare.column(field), full.column(field))
    assert torch.equal(bare.hist_KH, full.hist_KH)
