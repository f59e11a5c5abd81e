"""The drift is recovered by position of the mini-batch; tests/promises/test_measured.py holds windows and resumes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fspo.losses import ALGORITHMS, acceptance_band
from fspo.measured import DriftMeasurement
from fspo.responses import Responses


def rollout_batch(sigmas: list[float], lengths: np.ndarray) -> Responses:
    """S is normal with E[exp S] = 1, so that its mean is -sigma^2 L / 2; a sigma for each mini-batch."""
    draw = np.random.default_rng(0)
    s = [draw.normal(-(sigma**2) * lengths / 2, sigma * np.sqrt(lengths)) for sigma in sigmas]
    update = np.repeat(np.arange(len(sigmas)), len(lengths))
    rows = {"S": np.concatenate(s), "L": np.tile(lengths, len(sigmas)), "update": update, "minibatch": update}
    return Responses.of_rows(rows)


def test_drift_is_recovered_by_position_and_is_zero_on_policy() -> None:
    sigmas = [0.06 * i / 3 for i in range(4)]
    state = DriftMeasurement().update(rollout_batch(sigmas, np.random.default_rng(1).integers(1, 4001, 2000)))
    assert state.drift_by_mini_batch == pytest.approx([sigma**2 / 2 for sigma in sigmas], rel=0.1)
    # So S = 0, as in the first mini-batch, stays inside the band of long sequences.
    lengths = torch.tensor([10, 4000, 100_000])
    lower, upper = acceptance_band(lengths, ALGORITHMS["fspo_v1"], state.at_mini_batch(0))
    assert bool((lower <= 0).all()) and bool((upper >= 0).all())


def test_a_policy_that_grew_likelier_has_no_drift() -> None:
    rows = {"S": np.ones(5), "L": np.ones(5)}
    assert set(DriftMeasurement().update(Responses.of_rows(rows)).drift_by_mini_batch) == {0.0}
