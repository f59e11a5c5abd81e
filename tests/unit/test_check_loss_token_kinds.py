"""Synthetic tokens: the martingale identity."""

from __future__ import annotations

import numpy as np
import pytest

from fspo.check_loss.token_kinds import TokenKinds
from fspo.losses import sequence_log_ratio

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
