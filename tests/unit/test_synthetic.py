"""Synthetic log-ratios: the martingale identity, and which bands are flat over lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.synthetic import gaussian_acceptance, sums_of_log_ratios
from fspo.check_loss.token_kinds import TokenKinds
from fspo.losses import ALGORITHMS, sequence_log_ratio, sequence_policy_loss
from fspo.sums import SequenceSums
from fspo.types import BandState

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


def test_only_the_sqrt_band_is_flat_and_only_with_drift() -> None:
    lengths = np.array([1, 64, 1024, 8192, 32768])
    state = BandState(drift_per_token=KL)
    spread = {}
    for name in ("fspo", "fspo_v1", "seq_rloo", "seq_gspo"):
        rates = gaussian_acceptance(lengths, SIGMA, KL, ALGORITHMS[name], state)
        spread[name] = rates.max() - rates.min()
    assert spread["fspo_v1"] < 1e-9 and min(v for k, v in spread.items() if k != "fspo_v1") > 0.3
    sigma = 0.03  # the numbers of the text: c = sigma = 0.03, no drift correction
    rates = gaussian_acceptance(np.array([50, 8192]), sigma, sigma**2 / 2, ALGORITHMS["fspo"], state)
    assert rates == pytest.approx([0.68, 0.35], abs=0.005)


def test_sums_of_bare_log_ratios_are_those_of_the_loss() -> None:
    log_prob, old, mask = KINDS.log_probs(np.array([3, 40, 17, 40]), 40, np.random.default_rng(3))
    output = sequence_policy_loss(log_prob, old, torch.ones_like(old), mask, ALGORITHMS["fspo"])
    full = SequenceSums.zeros().add_(output)
    bare = sums_of_log_ratios(output.log_ratio_B.numpy(), output.length_B.numpy())
    for field in ("count", "S", "z_squared", "length", "length_sqrt"):
        torch.testing.assert_close(bare.column(field), full.column(field))
    assert torch.equal(bare.hist_KH, full.hist_KH)
