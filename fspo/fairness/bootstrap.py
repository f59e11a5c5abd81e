"""Bootstrap interval (95%) over problems. Imported on its own: scipy takes a second to load."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
from scipy import stats  # type: ignore[import-untyped]

from fspo.fairness.lre import Array, Interval, percentile_ends

_BATCH_ENTRIES = 4_000_000


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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # of values that are all equal
        resampled = stats.bootstrap(
            (sums_P, counts_P),
            ratio,
            paired=True,
            vectorized=True,
            n_resamples=resamples,
            batch=max(1, _BATCH_ENTRIES // n),
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    return Interval(value, *percentile_ends(resampled.bootstrap_distribution, n), n)
