"""Bootstrap intervals over seeds, paired where two arms share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from fspo.fairness.lre import Array


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its bootstrap interval; ``n`` is the number of seeds (or other clusters) behind it."""

    value: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


def mean_interval(values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Mean over seeds with a percentile bootstrap interval, widened about the mean for the small number of seeds.

    A percentile interval over n seeds is too narrow twice: the bootstrap's variance lacks the factor n / (n - 1), and
    the variance itself is estimated from n values. Widening by ``sqrt(n / (n - 1)) * t / z``, t and z the quantiles of
    Student's distribution with n - 1 degrees of freedom and of the Gaussian, mends both (after T. Hesterberg, The
    American Statistician 69 (2015), who adjusts the percentiles instead); measured coverage is in docs/fairness.md. One
    seed gives no interval: ``low`` and ``high`` are nan.

    Raises:
        ValueError: If ``values`` is empty or holds a value that is not finite.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size == 0 or not np.isfinite(x).all():
        raise ValueError(f"mean_interval needs one or more finite values, got {list(values)!r}")
    mean, n = float(x.mean()), int(x.size)
    if n == 1:
        return Interval(mean, float("nan"), float("nan"), 1)
    means = x[np.random.default_rng(seed).integers(0, n, (resamples, n))].mean(axis=1)
    tail = 50 * (1 - level)
    low, high = mean + _small_sample_factor(n, level) * (np.percentile(means, [tail, 100 - tail]) - mean)
    return Interval(mean, float(low), float(high), n)


def paired_difference(
    first: Sequence[float], second: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean of ``first[i] - second[i]`` over seeds i, with :func:`mean_interval`'s interval: seeds are resampled in
    pairs.

    Raises:
        ValueError: If the two do not have the same number of values.
    """
    if len(first) != len(second):
        raise ValueError(f"paired values must match seed by seed: got {len(first)} and {len(second)}")
    return mean_interval(
        [a - b for a, b in zip(first, second, strict=True)], level=level, resamples=resamples, seed=seed
    )


def paired_cluster_difference(
    first: Sequence[tuple[Array, Array]],
    second: Sequence[tuple[Array, Array]],
    statistic: Callable[[Array, Array], Array],
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Difference of a statistic of counts between two arms, resampling seeds and, within a seed, mini-batches.

    Both arms of a seed are resampled with the same draws, so whatever they share (data order, initial weights; the very
    sequences where bands are compared on common records) cancels.

    Args:
        first, second: One (accepted_MK, total_MK) per seed, in the same order of seeds. Mini-batches pair up where the
            two arms have equally many; otherwise each arm is resampled on its own within the seed.
        statistic: Maps (accepted [..., K], total [..., K]) to [...], for instance ``lambda a, t: plain_lre(a, t)[0]``.
        level, resamples, seed: As in :func:`mean_interval`.

    Returns:
        Mean over seeds of statistic(first) - statistic(second) on the pooled counts of each seed, with a percentile
        interval of the hierarchical bootstrap recentred on it and widened as in :func:`mean_interval`. With one seed
        only mini-batches are resampled.

    Raises:
        ValueError: If the numbers of seeds differ or there is none.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"paired arms need the same seeds, at least one: got {len(first)} and {len(second)}")
    rng = np.random.default_rng(seed)
    n = len(first)
    plain_S, drawn_SR = np.empty(n), np.empty((n, resamples))
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        plain_S[i] = _of_pooled(statistic, a) - _of_pooled(statistic, b)
        weights_a = _draw(rng, len(a[0]), resamples)
        weights_b = weights_a if len(a[0]) == len(b[0]) else _draw(rng, len(b[0]), resamples)
        drawn_SR[i] = statistic(weights_a @ a[0], weights_a @ a[1]) - statistic(weights_b @ b[0], weights_b @ b[1])
    mean = float(plain_S.mean())
    seeds_RS = rng.integers(0, n, (resamples, n)) if n > 1 else np.zeros((resamples, 1), dtype=np.int64)
    draws_R = drawn_SR[seeds_RS, np.arange(resamples)[:, None]].mean(axis=1)
    tail = 50 * (1 - level)
    spread = np.percentile(draws_R - draws_R.mean(), [tail, 100 - tail]) * _small_sample_factor(n, level)
    return Interval(mean, float(mean + spread[0]), float(mean + spread[1]), n)


def pooled_difference(
    first: Sequence[tuple[Array, Array]],
    second: Sequence[tuple[Array, Array]],
    statistic: Callable[[Array, Array], Array],
    *,
    over: str = "mini_batches",
    level: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """Difference of a statistic of all seeds' counts together between two arms, with a paired cluster bootstrap.

    Pooling comes first: a statistic with a noise floor, such as an LRE, is biased upward in the counts of one seed, and
    a mean over seeds keeps that bias.

    Args:
        first, second: One (accepted_MK, total_MK) per seed, in the same order of seeds.
        statistic: Maps (accepted [..., K], total [..., K]) to [...].
        over: What is resampled. ``mini_batches``: the mini-batches of each seed, with the same draws in both arms where
            they have equally many; it answers for these seeds. ``seeds``: whole seeds, in pairs, widened as in
            :func:`mean_interval`; it answers for other seeds too, and knows as many values as there are seeds.
        level, resamples, seed: As in :func:`mean_interval`.

    Returns:
        statistic(all of first) - statistic(all of second), with the percentiles of the resamples about their mean. One
        seed gives no interval over seeds.

    Raises:
        ValueError: If the numbers of seeds differ or there is none, or ``over`` is unknown.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"paired arms need the same seeds, at least one: got {len(first)} and {len(second)}")
    if over not in ("mini_batches", "seeds"):
        raise ValueError(f"over={over!r} must be 'mini_batches' or 'seeds'")
    n = len(first)
    value = _of_pooled(statistic, _joined(first)) - _of_pooled(statistic, _joined(second))
    if over == "seeds" and n == 1:
        return Interval(value, float("nan"), float("nan"), 1)
    rng = np.random.default_rng(seed)
    if over == "seeds":
        drawn_RS = _draw(rng, n, resamples)
        pair_a, pair_b = (
            tuple(drawn_RS @ np.stack([arm[i].sum(0) for arm in arms]) for i in (0, 1)) for arms in (first, second)
        )
        widen = _small_sample_factor(n, level)
    else:
        sums: list[list[Array]] = []
        for a, b in zip(first, second, strict=True):
            weights_a = _draw(rng, len(a[0]), resamples)
            weights_b = weights_a if len(a[0]) == len(b[0]) else _draw(rng, len(b[0]), resamples)
            sums.append([weights_a @ a[0], weights_a @ a[1], weights_b @ b[0], weights_b @ b[1]])
        acc_a, tot_a, acc_b, tot_b = (np.sum([row[i] for row in sums], axis=0) for i in range(4))
        pair_a, pair_b, widen = (acc_a, tot_a), (acc_b, tot_b), 1.0
    drawn_R = statistic(*pair_a) - statistic(*pair_b)
    tail = 50 * (1 - level)
    spread = np.percentile(drawn_R - drawn_R.mean(), [tail, 100 - tail]) * widen
    return Interval(value, float(value + spread[0]), float(value + spread[1]), n)


def _joined(arms: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.concatenate([arm[0] for arm in arms]), np.concatenate([arm[1] for arm in arms])


def _of_pooled(statistic: Callable[[Array, Array], Array], counts: tuple[Array, Array]) -> float:
    return float(statistic(counts[0].sum(0), counts[1].sum(0)))


def _draw(rng: np.random.Generator, m: int, resamples: int) -> npt.NDArray[np.float64]:
    return rng.multinomial(m, np.full(m, 1.0 / m), resamples).astype(np.float64)


def _small_sample_factor(n: int, level: float) -> float:
    if n < 2:
        return 1.0
    p = 0.5 + level / 2
    return float(np.sqrt(n / (n - 1))) * student_quantile(p, n - 1) / NormalDist().inv_cdf(p)


def student_quantile(p: float, freedom: int) -> float:
    """Quantile, p > 1/2, of Student's t: with t = sqrt(nu) tan(angle) its density is proportional to cos^(nu - 1)."""
    angle = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(np.sqrt(freedom) * np.tan(np.interp(p - 0.5, mass / mass[-1] / 2, angle)))
