"""The Length Reweighting Error by hand and by simulation, and bins of length. Its interval: tests/promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fspo.fairness.lre import (
    MIN_CLUSTERS,
    bins_of,
    length_reweighting_error,
    lre_in_words,
    plain_lre,
    wilson_interval,
)

FAST = settings(max_examples=40)


@FAST
@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 20), st.integers(1, 8)), elements=st.integers(0, 60)))
def test_the_estimate_is_bounded_and_its_own_again(total: np.ndarray) -> None:
    accepted = np.random.default_rng(0).binomial(total, 0.6)
    assume(accepted.sum() > 0)
    error = length_reweighting_error(accepted, total, resamples=50)
    assert 0 <= error.debiased.value <= error.lre <= 2 * (1 - error.rate) + 1e-12, "the largest LRE at a rate"
    if (total.sum(1) > 0).sum() >= MIN_CLUSTERS:
        assert error.debiased.low <= error.debiased.value <= error.debiased.high
    else:
        assert np.isnan([error.debiased.low, error.debiased.high]).all()
    seen = total.sum(0) > 0
    assert (error.rate_low_K[seen] <= error.rate_K[seen] + 1e-12).all()
    assert (error.rate_high_K[seen] >= error.rate_K[seen] - 1e-12).all()
    assert str(length_reweighting_error(accepted, total, resamples=50)) == str(error), "the same draws"


@pytest.mark.parametrize("counts", [([0, 0], [0, 0]), ([0, 0], [5, 5]), ([[0]] * 10, [[3]] * 10)])
def test_what_is_undefined_is_nan(counts: tuple[list[int], list[int]]) -> None:
    error = length_reweighting_error(*counts)
    assert np.isnan([error.lre, error.debiased.value, error.debiased.low, error.noise_floor]).all()
    assert not error.is_informative and error.words == "-"


def test_the_noise_is_taken_out_and_a_real_effect_stays() -> None:
    """Eight bins of 600 responses, in ten clusters of 60, at 0.85: the noise floor is 0.013."""
    rng, total = np.random.default_rng(1), np.full((10, 8), 60)
    assert length_reweighting_error(total * 0.85, total, resamples=4000).noise_floor == pytest.approx(0.013, abs=5e-4)
    flat = [length_reweighting_error(rng.binomial(total, 0.85), total, resamples=100) for _ in range(200)]
    assert np.mean([e.lre for e in flat]) == pytest.approx(0.0128, abs=0.001)
    assert np.mean([e.debiased.value for e in flat]) < 0.45 * 0.0128
    rates = 0.8 * (1 + 0.2 * np.linspace(-1, 1, 8))
    real = [length_reweighting_error(rng.binomial(total, rates), total, resamples=100) for _ in range(100)]
    assert np.mean([e.debiased.value for e in real]) == pytest.approx(float(plain_lre(rates, np.ones(8))), abs=0.003)


@FAST
@given(hnp.arrays(np.int64, st.integers(0, 200), elements=st.integers(1, 3000)))
def test_bins_hold_every_length_and_are_never_empty(length: np.ndarray) -> None:
    bin_B = bins_of(length)
    number = int(bin_B.max(initial=-1)) + 1
    assert set(bin_B) == set(range(number)) and number <= 8
    assert (np.diff(bin_B[np.argsort(length, kind="stable")]) >= 0).all(), "longer ones are in later bins"


def test_bins_have_equal_mass_but_for_ties() -> None:
    spread = np.exp(np.random.default_rng(0).uniform(np.log(20), np.log(4000), 8000)).astype(int)
    count = np.bincount(bins_of(spread))
    assert len(count) == 8 and count.min() > 800 and count.max() < 1200
    tied = np.repeat([10, 20, 30, 40], [1, 1, 97, 1])
    assert len(np.bincount(bins_of(tied))) < 4 and max(np.bincount(bins_of(tied))) >= 97


def test_wilson_interval_known_values() -> None:
    np.testing.assert_allclose(wilson_interval([0.5, 0], [100, 10]), [[0.40383, 0], [0.59617, 0.27753]], atol=1e-5)


def test_an_interval_that_reaches_0_has_its_upper_end_alone() -> None:
    for low, high, says in ((0.011, 0.043, "0.029 [0.011, 0.043]"), (4e-4, 0.29, "< 0.290"), (np.nan, np.nan, "0.029")):
        assert lre_in_words(0.029, low, high) == says
