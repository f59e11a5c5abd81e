"""LRE by hand, its noise floor and interval by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fspo.fairness.bootstrap import mean_interval, pooled_difference
from fspo.fairness.lre import (
    Array,
    debiased_lre,
    equal_mass_starts,
    length_reweighting_error,
    lre_in_words,
    merge_bins,
    plain_lre,
    wilson_interval,
)

FAST = settings(max_examples=40)


def test_known_case_by_hand() -> None:
    # Shares 1/4 and 3/4, rates 0.4 and 0.8: overall 0.7, deviations 3/7 and 1/7, LRE (3/7 + 3/7) / 4.
    error = length_reweighting_error([40, 240], [100, 300])
    assert error.rate == pytest.approx(0.7)
    assert error.lre == pytest.approx(3 / 14)
    assert error.lre_max == pytest.approx(3 / 7)
    np.testing.assert_allclose(error.rate_K, [0.4, 0.8])
    np.testing.assert_allclose(plain_lre([0, 40, 0, 240], [0, 100, 0, 300]), (3 / 14, 3 / 7))  # empty bins


@FAST
@given(st.lists(st.integers(0, 50), min_size=1, max_size=10), st.integers(1, 9))
def test_flat_rates_give_zero(tens: list[int], accepted_of_ten: int) -> None:
    assume(sum(tens) > 0)
    error = length_reweighting_error(np.array(tens) * accepted_of_ten, np.array(tens) * 10, resamples=20)
    assert [error.lre, error.lre_max, error.debiased.value] == pytest.approx([0, 0, 0], abs=1e-12)


@FAST
@given(hnp.arrays(np.int64, st.integers(1, 8), elements=st.integers(0, 60)), st.integers(0, 1000))
def test_estimate_is_bounded_and_consistent(total: np.ndarray, seed: int) -> None:
    accepted = np.random.default_rng(seed).binomial(total, 0.6)
    assume(accepted.sum() > 0)
    error = length_reweighting_error(accepted, total, resamples=50, seed=seed)
    assert 0 <= error.debiased.value <= error.lre <= error.lre_max + 1e-12
    assert error.lre <= 2 * (1 - error.rate) + 1e-12, "the largest LRE at an acceptance rate"
    assert error.debiased.low <= error.debiased.value <= error.debiased.high
    seen = total > 0
    assert (error.rate_low_K[seen] <= error.rate_K[seen] + 1e-12).all()
    assert (error.rate_high_K[seen] >= error.rate_K[seen] - 1e-12).all()
    assert np.isnan(error.rate_K[~seen]).all()
    again = length_reweighting_error(accepted, total, resamples=50, seed=seed)
    assert (again.debiased, again.noise_floor) == (error.debiased, error.noise_floor)


@pytest.mark.parametrize("counts", [([0, 0], [0, 0]), ([0, 0], [5, 5]), ([[0]] * 10, [[3]] * 10)])
def test_undefined_reads_nan(counts: tuple[list[int], list[int]]) -> None:
    error = length_reweighting_error(*counts)
    assert np.isnan([error.lre, error.lre_max, error.debiased.value, error.debiased.low, error.noise_floor]).all()


def test_noise_floor_of_eight_bins_of_600_at_085() -> None:
    error = length_reweighting_error([510] * 8, [600] * 8, resamples=4000)
    assert error.noise_floor == pytest.approx(0.013, abs=0.0005)


def test_debiasing_takes_most_of_the_noise_out_and_keeps_a_real_effect() -> None:
    rng = np.random.default_rng(1)
    flat = [length_reweighting_error(rng.binomial(600, np.full(8, 0.85)), np.full(8, 600), resamples=100)
            for _ in range(200)]  # fmt: skip
    assert np.mean([e.lre for e in flat]) == pytest.approx(0.0128, abs=0.001)
    assert np.mean([e.debiased.value for e in flat]) < 0.4 * 0.0128
    rates = 0.8 * (1 + 0.2 * np.linspace(-1, 1, 8))
    true = float(plain_lre(rates, np.ones(8))[0])
    real = [length_reweighting_error(rng.binomial(600, rates), np.full(8, 600), resamples=100) for _ in range(100)]
    assert np.mean([e.debiased.value for e in real]) == pytest.approx(true, abs=0.002)


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1])
def test_interval_covers_under_clustering(spread: float) -> None:
    """Mini-batches with shifts of their own: the cluster bootstrap covers, resampling sequences does not."""
    rng = np.random.default_rng(2)
    mean_rate = 0.8 * (1 + spread * np.linspace(-1, 1, 8))
    true = float(plain_lre(mean_rate, np.ones(8))[0])
    total = np.full((24, 8), 20)
    covered = naive = 0
    for i in range(120):
        rate_MK = np.clip(mean_rate + rng.normal(0, 0.1, (24, 8)), 0, 1)
        accepted = rng.binomial(total, rate_MK)
        error = length_reweighting_error(accepted, total, resamples=200, seed=i)
        pooled = length_reweighting_error(accepted.sum(0), total.sum(0), resamples=200, seed=i)
        assert error.debiased.n == 24 and pooled.debiased.n == 0
        covered += error.debiased.low - 1e-12 <= true <= error.debiased.high
        naive += pooled.debiased.low - 1e-12 <= true <= pooled.debiased.high
    assert covered / 120 >= 0.88
    if spread == 0.1:
        assert covered > naive


@pytest.mark.parametrize(("accepted", "total"), [([1, 2], [1]), ([3], [2]), ([-1], [2]), ([np.nan], [2]), ([], [])])
def test_bad_counts_are_refused(accepted: list[float], total: list[float]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        length_reweighting_error(accepted, total)
    # Shares of a weight may exceed their total by rounding.
    assert length_reweighting_error([100 * (1 + 1e-12), 10.0], [100.0, 20.0]).rate_K.tolist() == [1.0, 0.5]


@FAST
@given(hnp.arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 30)), st.integers(1, 12))
def test_equal_mass_bins_partition_and_are_never_empty(total: np.ndarray, n: int) -> None:
    starts = equal_mass_starts(total, n)
    assert starts[0] == 0 and (np.diff(starts) > 0).all() and len(starts) <= n
    merged = merge_bins(total, starts)
    assert merged.sum() == total.sum()
    if total.sum():
        assert (merged > 0).all()


def test_equal_mass_bins_without_ties_are_equal_and_ties_stay_together() -> None:
    np.testing.assert_array_equal(merge_bins(np.ones(80), equal_mass_starts(np.ones(80), 8)), np.full(8, 10))
    tied = np.array([1, 1, 97, 1])
    assert 97 in merge_bins(tied, equal_mass_starts(tied, 4)) or len(equal_mass_starts(tied, 4)) < 4


def test_wilson_interval_known_values() -> None:
    low, high = wilson_interval([0.5, 0.0], [100, 10])
    np.testing.assert_allclose([low[0], high[0]], [0.40383, 0.59617], atol=1e-5)
    assert low[1] == pytest.approx(0, abs=1e-12) and high[1] == pytest.approx(0.2775, abs=1e-4)


def test_one_seed_gives_no_interval() -> None:
    group = _group(np.random.default_rng(3), [0.9, 0.7], seeds=1)
    assert np.isnan(mean_interval([1.0]).low) and np.isnan(pooled_difference(group, group, _plain, over="seeds").low)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_mean_interval_coverage(seeds: int) -> None:
    rng = np.random.default_rng(4)
    intervals = [mean_interval(rng.normal(0, 1, seeds).tolist(), resamples=400, seed=i) for i in range(400)]
    assert 0.92 <= np.mean([i.low <= 0 <= i.high for i in intervals]) <= 0.985


def _group(
    rng: np.random.Generator, rates: list[float], seeds: int = 5, batches: int = 30
) -> list[tuple[Array, Array]]:
    total = np.full((batches, len(rates)), 8.0)
    return [(rng.binomial(8, rates, (batches, len(rates))).astype(float), total) for _ in range(seeds)]


def _plain(accepted: Array, total: Array, _: object) -> Array:
    return plain_lre(accepted, total)[0]


def test_pooled_difference_is_that_of_the_pooled_counts() -> None:
    rng = np.random.default_rng(0)
    flat, steep = _group(rng, [0.85] * 4), _group(rng, [0.95, 0.9, 0.8, 0.7])
    apart = pooled_difference(flat, steep, _plain)

    def pooled(group: list[tuple[Array, Array]]) -> float:
        return float(plain_lre(sum(a.sum(0) for a, _ in group), sum(t.sum(0) for _, t in group))[0])

    assert apart.value == pytest.approx(pooled(flat) - pooled(steep))
    assert apart.excludes_zero
    assert apart.value == pytest.approx(-0.089, abs=0.03)  # steep alone: mean of |0.95, 0.9, 0.8, 0.7| / 0.8375 - 1
    over_seeds = pooled_difference(flat, steep, _plain, over="seeds")
    assert over_seeds.value == apart.value
    assert over_seeds.excludes_zero


@pytest.mark.parametrize("over", ["mini_batches", "seeds"])
def test_pooled_difference_covers_zero_between_equal_groups(over: str) -> None:
    rng, outside = np.random.default_rng(1), 0
    for trial in range(60):
        a, b = _group(rng, [0.9, 0.8, 0.7, 0.9]), _group(rng, [0.9, 0.8, 0.7, 0.9])
        outside += pooled_difference(a, b, _plain, over=over, resamples=400, seed=trial).excludes_zero
    assert outside <= 9  # 5% of 60 are 3; more than 9 has a probability below 0.001


@pytest.mark.parametrize("over", ["mini_batches", "seeds"])
def test_a_flat_band_is_not_called_worse_than_none_for_the_noise_of_its_mini_batches(over: str) -> None:
    """Their sequences share the policy's shift: three times the noise of independent ones here."""
    rng, claims = np.random.default_rng(4), 0
    total = np.full((45, 8), 8.0)
    for trial in range(30):
        logit = 2.6 + rng.normal(size=(5, 45, 1)) + 2 * rng.normal(size=(5, 45, 8))
        flat = [(rng.binomial(8, 1 / (1 + np.exp(-logit_MK))).astype(float), total) for logit_MK in logit]
        difference = pooled_difference(flat, [(total, total)] * 5, debiased_lre, over=over, resamples=200, seed=trial)
        claims += difference.excludes_zero
    assert claims <= 5  # with binomial noise 10 and more


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.011, 0.043, "0.029 [0.011, 0.043]"),
        (0.0, 0.29, "< 0.290"),
        (4e-4, 0.29, "< 0.290"),
        (np.nan, np.nan, "0.029"),
    ],
)
def test_an_interval_that_reaches_0_has_its_upper_end_alone(low: float, high: float, says: str) -> None:
    assert lre_in_words(0.029, low, high) == says
