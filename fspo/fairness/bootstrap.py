"""Bootstrap intervals (95%) over seeds, problems and mini-batches.

Imported on its own, not with :mod:`fspo.fairness.lre`: scipy takes a second to load, and training has no use for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats  # type: ignore[import-untyped]

from fspo.fairness.lre import Array, Interval, length_reweighting_error, percentile_ends

Counts = tuple[Array, Array]
"""``(accepted_MK, total_MK)`` of one run: accepted and all sequences, by mini-batch and length bin."""

_BATCH_ENTRIES = 4_000_000


def student_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t with this many degrees of freedom."""
    return float(stats.t.ppf(p, freedom))


def mean_interval(values: Sequence[float], *, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Mean over seeds with a percentile bootstrap interval, widened about the mean for the small number of seeds.

    A percentile interval over n seeds is too narrow for two reasons: the bootstrap's variance lacks the factor
    n / (n - 1), and the variance itself is estimated from n values. Widening by ``sqrt(n / (n - 1)) * t / z``, t and z
    the quantiles of Student's distribution with n - 1 degrees of freedom and of the Gaussian, corrects both (after
    T. Hesterberg, The American Statistician 69 (2015), who adjusts the percentiles instead). The measured coverage is
    in docs/fairness.md. Values are finite, at least one; a single one gives no interval: ``low`` and ``high`` are nan.
    """
    x = np.asarray(values, dtype=np.float64)
    mean, n = float(x.mean()), int(x.size)
    if n == 1:
        return Interval(mean, float("nan"), float("nan"), 1)
    means_R = _resampled(np.mean, (x,), resamples, seed)
    low, high = mean + _small_sample_factor(n) * (np.percentile(means_R, [2.5, 97.5]) - mean)
    return Interval(mean, float(low), float(high), n)


def ratio_interval(sums: npt.ArrayLike, counts: npt.ArrayLike, *, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Ratio of sums over problems, ``sum(sums) / sum(counts)``, with a bootstrap interval over whole problems.

    With counts of 1 this is a mean over problems. The interval (:func:`fspo.fairness.lre.percentile_ends`) stays in the
    range of the data, which a share must. Resamples without any count are left out. If all problems have one value, the
    interval has no width and says nothing. One problem gives no interval.

    Args:
        sums, counts: One value per problem, at least one; counts are not negative, and some count is positive.
    """
    sums_P, counts_P = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    value, n = float(sums_P.sum() / counts_P.sum()), len(sums_P)
    if n == 1:
        return Interval(value, float("nan"), float("nan"), 1)

    def ratio(sums: Array, counts: Array, axis: int) -> Array:
        with np.errstate(invalid="ignore"):  # 0 / 0 in a resample without any count
            return np.asarray(sums.sum(axis) / counts.sum(axis))

    ratios_R = _resampled(ratio, (sums_P, counts_P), resamples, seed)
    return Interval(value, *percentile_ends(ratios_R, n), n)


# scipy's bootstrap resamples one level of independent units. The one below resamples mini-batches within seeds, with
# the same draws in both groups, so it draws for itself.


def pooled_difference(
    first: Sequence[Counts],
    second: Sequence[Counts],
    statistic: Callable[[Array, Array, float], Array],
    *,
    over: Literal["mini_batches", "seeds"] = "mini_batches",
    resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """Difference between two run groups of a statistic of all seeds' counts together, with a paired cluster bootstrap.

    Counts are pooled first. A statistic with a noise floor, such as an LRE, is biased upward in the counts of one seed,
    and a mean over seeds would keep that bias.

    Args:
        first, second: The counts of one run per seed, of the same seeds in the same order, at least one.
        statistic: Maps (accepted [..., K], total [..., K], noise variance of the group's counts) to [...], as
            :func:`fspo.fairness.lre.debiased_lre` does.
        over: What is resampled. ``mini_batches``: those of each seed, with the same draws in both runs where these have
            equally many, so that what they share cancels; valid for these seeds. ``seeds``: whole seeds, in pairs,
            widened as in :func:`mean_interval`; the interval is valid for other seeds too, but it rests on as many
            values as there are seeds.
        resamples, seed: As in :func:`mean_interval`.

    Returns:
        statistic(all of first) - statistic(all of second), with the percentiles of the resamples about their mean. One
        seed gives no interval over seeds.
    """
    n = len(first)
    a, b = (
        (np.stack([accepted.sum(0) for accepted, _ in group]), np.stack([total.sum(0) for _, total in group]))
        for group in (first, second)
    )
    noise_a, noise_b = (noise_variance(group) for group in (first, second))

    def difference(sums: Sequence[Array]) -> Array:
        accepted_a, total_a, accepted_b, total_b = sums
        return statistic(accepted_a, total_a, noise_a) - statistic(accepted_b, total_b, noise_b)

    value = float(difference([a[0].sum(0), a[1].sum(0), b[0].sum(0), b[1].sum(0)]))
    if over == "seeds" and n == 1:
        return Interval(value, float("nan"), float("nan"), 1)
    rng = np.random.default_rng(seed)
    pairs = [(a, b)] if over == "seeds" else zip(first, second, strict=True)
    sums = [_resampled_sums(rng, x, y, resamples) for x, y in pairs]
    drawn_R = difference([np.sum(column, axis=0) for column in zip(*sums, strict=True)])
    factor = _small_sample_factor(n) if over == "seeds" else 1.0
    low, high = value + np.percentile(drawn_R - drawn_R.mean(), [2.5, 97.5]) * factor
    return Interval(value, float(low), float(high), n)


def _resampled(statistic: Callable[..., Any], data: tuple[Array, ...], resamples: int, seed: int) -> Array:
    """The statistic of each of ``resamples`` bootstrap resamples of paired data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # of values that are all equal
        resampled = stats.bootstrap(
            data,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=resamples,
            batch=max(1, _BATCH_ENTRIES // len(data[0])),
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    return np.asarray(resampled.bootstrap_distribution)


def _resampled_sums(rng: np.random.Generator, a: Counts, b: Counts, resamples: int) -> list[Array]:
    """Accepted and all of a, accepted and all of b, each [resamples, K]; with the same draws if they pair up."""

    def draws(m: int) -> Array:
        return rng.multinomial(m, np.full(m, 1.0 / m), resamples).astype(np.float64)

    weights_a = draws(len(a[0]))
    weights_b = weights_a if len(a[0]) == len(b[0]) else draws(len(b[0]))
    return [weights_a @ a[0], weights_a @ a[1], weights_b @ b[0], weights_b @ b[1]]


def noise_variance(group: Sequence[Counts]) -> float:
    """What :func:`fspo.fairness.lre.debiased_lre` needs of a run group, by all its mini-batches."""
    accepted_MK, total_MK = (np.concatenate(columns) for columns in zip(*group, strict=True))
    return length_reweighting_error(accepted_MK, total_MK).noise_variance


def _small_sample_factor(n: int) -> float:
    return float(np.sqrt(n / (n - 1)) * student_quantile(0.975, n - 1) / stats.norm.ppf(0.975))
