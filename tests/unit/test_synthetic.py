"""Synthetic log-ratios: the martingale identity, and acceptance by length against the Gaussian prediction."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.synthetic import (
    TokenKinds,
    gaussian_acceptance,
    gaussian_log_ratios,
    measured_acceptance,
    sums_of_log_ratios,
    uneven_rollout_batch,
)
from fspo.losses import ALGORITHMS, sequence_log_ratio
from fspo.sums import SequenceSums
from fspo.types import BandState

KINDS = TokenKinds.random(0.03, np.random.default_rng(0))


def test_identity_holds_exactly_for_one_token() -> None:
    p, q = KINDS.p_J, KINDS.q_J
    np.testing.assert_allclose(p * (q / p) + (1 - p) * ((1 - q) / (1 - p)), 1.0, rtol=1e-12)
    assert KINDS.sigma == pytest.approx(0.03, rel=0.02)
    assert KINDS.kl_per_token == pytest.approx(KINDS.sigma**2 / 2, rel=0.02)


@pytest.mark.parametrize("length", [1, 30, 500])
@pytest.mark.parametrize("gaussian", [False, True])
def test_identity_drift_and_dispersion_of_samples(length: int, gaussian: bool) -> None:
    rng, n = np.random.default_rng(length), 20_000
    lengths = np.full(n, length)
    S = gaussian_log_ratios(lengths, KINDS.sigma, rng) if gaussian else KINDS.log_ratios(lengths, rng)
    kl = KINDS.sigma**2 / 2 if gaussian else KINDS.kl_per_token
    for values, expected in ((np.exp(S), 1.0), (S, -length * kl)):
        assert abs(values.mean() - expected) < 4 * values.std() / n**0.5
    assert S.std() == pytest.approx(KINDS.sigma * length**0.5, rel=0.03)


def test_tokens_and_counts_give_the_same_distribution() -> None:
    lengths = np.full(2000, 40)
    log_prob, old, mask = KINDS.log_probs(lengths, 48, np.random.default_rng(1))
    S = sequence_log_ratio(log_prob, old, mask).numpy()
    counted = KINDS.log_ratios(lengths, np.random.default_rng(2))
    assert mask.sum(-1).tolist() == lengths.tolist()
    assert abs(S.mean() - counted.mean()) < 4 * (S.var() / 2000 + counted.var() / 2000) ** 0.5
    assert S.std() == pytest.approx(counted.std(), rel=0.1)


@pytest.mark.parametrize("name", ["fspo", "seq_rloo", "seq_gspo"])
@pytest.mark.parametrize("drift", ["none", "kl"])
def test_measured_acceptance_agrees_with_the_gaussian_prediction(name: str, drift: str) -> None:
    settings = dataclasses.replace(ALGORITHMS[name], drift=drift)
    state = BandState(drift_per_token=KINDS.kl_per_token)
    # A Gaussian S agrees at any length, two-way tokens from where the sum has become Gaussian.
    lengths = np.array([1, 8, 64, 512, 4096, 32768])
    gaussian_kl = KINDS.sigma**2 / 2
    rng, n = np.random.default_rng(5), 4000
    for world, shortest in (("gaussian", 1), ("tokens", 64)):
        for length in lengths[lengths >= shortest]:
            column = np.full(n, length)
            if world == "gaussian":
                S, kl = gaussian_log_ratios(column, KINDS.sigma, rng), gaussian_kl
            else:
                S, kl = KINDS.log_ratios(column, rng), KINDS.kl_per_token
            expected = float(gaussian_acceptance(np.array([length]), KINDS.sigma, kl, settings, state)[0])
            measured = float(measured_acceptance(S, column, settings, state).mean())
            noise = 4 * (max(expected * (1 - expected), 1 / n) / n) ** 0.5
            assert abs(measured - expected) < noise + 0.01, (world, length, measured, expected)


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


def test_uneven_rollout_batch_starts_on_policy() -> None:
    parts = uneven_rollout_batch(np.random.default_rng(0), 32)
    assert len(parts) == 4 and not parts[0][0].any()
    assert all(S.shape == L.shape == (32,) and L.min() >= 1 for S, L in parts)
