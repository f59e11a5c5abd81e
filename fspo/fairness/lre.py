"""The Length Reweighting Error with its interval, the one bootstrap behind every interval, and bins of length.

The paper names a Length Reweighting Error, but its formula was not available. Its definition here is this project's;
docs/fairness.md explains it. With p_b the share of length bin b, a_b its acceptance rate and abar the rate of all::

    LRE = sum_b p_b |a_b / abar - 1|

Absolute values make sampling noise add to it: eight bins of 600 responses with a flat rate of 0.85 give a mean LRE of
0.013. Every estimate therefore has a noise floor, a value without the noise, and an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MIN_CLUSTERS: Final = 8
"""With fewer, the spread between them is too uncertain for an interval."""
#: Where a bin of length may begin: at each length to 17, then in eighths of an octave.
_BORDERS: Final = np.unique([*range(1, 18), *np.rint(2.0 ** np.arange(4, 40, 1 / 8))]).astype(np.int64)
#: Rates this close to 1 count as 1: the share of a weight that a loss keeps carries rounding.
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the ends of its 95% interval, nan where the data give none.

    ``n`` is the number of independent units behind it: seeds, problems or clusters, as the function that made it says.
    """

    value: float
    low: float
    high: float
    n: int


def lre_in_words(value: float, low: float, high: float) -> str:
    """A debiased LRE with its interval; ``< high`` where the interval reaches 0, which excludes no even clip.

    The debiased value is cut at 0, so that without its interval noise would read as perfect evenness.
    """
    if math.isnan(low):
        return f"{value:.3f}"
    return f"{value:.3f} [{low:.3f}, {high:.3f}]" if round(low, 3) > 0 else f"< {high:.3f}"


def wilson_interval(rate: npt.ArrayLike, n: npt.ArrayLike) -> tuple[Array, Array]:
    """Wilson score interval (95%) of a binomial rate of ``n`` independent trials; nan at n = 0.

    Unlike scipy's it takes arrays. Source: E. B. Wilson, JASA 22 (1927).
    """
    z = NormalDist().inv_cdf(0.975)
    p, trials = np.asarray(rate, dtype=np.float64), np.asarray(n, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
        half = z / (1 + z * z / trials) * np.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2))
    return np.clip(centre - half, 0.0, 1.0), np.clip(centre + half, 0.0, 1.0)


def drawn_clusters(clusters: int, resamples: int = 1000) -> Array:
    """How often each of so many clusters is drawn in each resample, [R, C]."""
    draws = np.random.default_rng(0).multinomial(clusters, np.full(clusters, 1 / clusters), resamples)
    return draws.astype(np.float64)


def percentile_ends(drawn_R: npt.ArrayLike, n: int) -> tuple[float, float]:
    """Ends of the 95% interval of a statistic, from its values over resamples of ``n`` independent units.

    The expanded percentile interval: the percentiles at ``Phi(sqrt(n / (n - 1)) t)``, t the quantile of Student's
    distribution with n - 1 degrees of freedom. Values that are nan are left out; (nan, nan) if all are, or of one unit.
    Source: T. Hesterberg, The American Statistician 69 (2015), section 3.6.
    """
    # A quarter of a second, which the losses have no use for.
    from scipy.special import ndtr, stdtrit  # type: ignore[import-untyped]

    drawn = np.asarray(drawn_R, dtype=np.float64)
    if n < 2 or np.isnan(drawn).all():
        return float("nan"), float("nan")
    tail = ndtr(math.sqrt(n / (n - 1)) * stdtrit(n - 1, 0.025))
    low, high = np.nanquantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


def cluster_interval(statistic: Callable[..., float], sums: Sequence[Array]) -> Interval:
    """A statistic of sums by bin, [J] each, with its interval by resampled clusters; ``sums`` are [C, J] each."""
    clusters, size = sums[0].shape
    flat_CX = np.concatenate(sums, axis=1)

    def of(sums_X: Array) -> float:
        return statistic(*sums_X.reshape(-1, size))

    drawn_R = [of(sums_X) for sums_X in drawn_clusters(clusters) @ flat_CX]
    return Interval(of(flat_CX.sum(0)), *percentile_ends(drawn_R, clusters), clusters)


def bins_of(length_B: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Bin of each length, numbered from 0, of at most eight of nearly equal mass, int64 [B]. Defined here.

    Bin j ends at the border (every length to 17, then eighths of an octave) before which the share of the responses is
    nearest to j / 8, so that equal lengths stay together. Where many have one length there are fewer bins.
    """
    cell_B = np.searchsorted(_BORDERS, length_B, side="right") - 1
    count = np.bincount(cell_B)
    used = np.flatnonzero(count)
    reached = np.concatenate([[0], np.cumsum(count[used])])
    first = {int(np.abs(reached - reached[-1] * j / 8).argmin()) for j in range(8)} - {len(used)}
    return np.searchsorted(used[sorted(first)], cell_B, side="right") - 1


@dataclass(frozen=True, slots=True)
class LengthReweightingError:
    """Result of :func:`length_reweighting_error`. All rates and errors are plain ratios (no unit).

    Attributes:
        lre: The error as it is, biased upward by noise.
        debiased: The error without what noise explains, and its 95% interval; ``n`` is the number of clusters. With
            fewer than MIN_CLUSTERS of them nothing is taken out, and there is no interval.
        noise_floor: Mean error that flat rates of independent responses would give with these counts.
        rate: Overall acceptance abar.
        rate_K: Acceptance by bin (nan in empty bins).
        rate_low_K, rate_high_K: Interval of the acceptance by bin: Wilson's, or the bootstrap's ends where they lie
            further out.
    """

    lre: float
    debiased: Interval
    noise_floor: float
    rate: float
    rate_K: Array
    rate_low_K: Array
    rate_high_K: Array

    @property
    def is_informative(self) -> bool:
        """Whether it means anything: nothing accepted leaves it undefined, nothing clipped makes any band even."""
        return 0 < self.rate < 1 - _ROUNDING

    @property
    def words(self) -> str:
        """:func:`lre_in_words`; ``-`` where nothing was accepted or nothing clipped."""
        return lre_in_words(self.debiased.value, self.debiased.low, self.debiased.high) if self.is_informative else "-"


def plain_lre(accepted: npt.ArrayLike, total: npt.ArrayLike) -> Array:
    """LRE without any correction, along the last axis, of accepted and all responses by bin, [..., K].

    Empty bins do not count; nan where nothing was accepted or there is no response.
    """
    share, deviation = _share_and_deviation(np.asarray(accepted, np.float64), np.asarray(total, np.float64))
    return np.asarray(np.sum(share * np.abs(deviation), axis=-1))


def length_reweighting_error(
    accepted: npt.ArrayLike, total: npt.ArrayLike, *, resamples: int = 1000
) -> LengthReweightingError:
    """LRE of acceptance counts by bin, with its noise floor, a debiased value and an interval. Defined here.

    The responses of one cluster (a prompt group, or a mini-batch) are no independent draws, so whole clusters are
    resampled.

    * ``debiased``: with d_b = a_b / abar - 1 and s_b the standard error of d_b,
      ``lre * sqrt(max(0, 1 - sum_b p_b s_b**2 / sum_b p_b d_b**2))``. It is never negative. Where rates are exactly
      flat, about a quarter of the noise floor remains.
    * its interval: of the debiased value over resamples, which are drawn around deviations shrunk by the same factor.
      Otherwise the noise of the data would count twice.

    Where nothing was accepted, or there is no response, LRE is undefined and nan.

    Args:
        accepted: Accepted responses by bin, [K], or by cluster and bin, [C, K].
        total: All responses, of the same shape.
        resamples: Number of resamples, and of simulated data sets behind the noise floor.
    """
    acc_CK, tot_CK = (np.atleast_2d(np.asarray(counts, dtype=np.float64)) for counts in (accepted, total))
    acc_K, tot_K, nan = acc_CK.sum(0), tot_CK.sum(0), float("nan")
    with np.errstate(divide="ignore", invalid="ignore"):
        rate_K, rate = acc_K / tot_K, float(acc_K.sum() / tot_K.sum())
    if not rate > 0:
        return LengthReweightingError(nan, Interval(nan, nan, nan, 0), nan, rate, rate_K, rate_K * nan, rate_K * nan)
    lre = float(plain_lre(acc_K, tot_K))
    flat_RK = np.random.default_rng(0).binomial(tot_K.astype(np.int64), min(rate, 1.0), (resamples, len(tot_K)))
    floor = float(np.nan_to_num(plain_lre(flat_RK, tot_K)).mean())
    low_K, high_K = wilson_interval(np.minimum(rate_K, 1.0), tot_K)
    clusters = int((tot_CK.sum(1) > 0).sum())
    if clusters < MIN_CLUSTERS:
        return LengthReweightingError(lre, Interval(lre, nan, nan, clusters), floor, rate, rate_K, low_K, high_K)
    drawn_RC = drawn_clusters(len(acc_CK), resamples)
    acc_RK, tot_RK = drawn_RC @ acc_CK, drawn_RC @ tot_CK
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = np.nanpercentile(acc_RK / tot_RK, [2.5, 97.5], axis=0) if (tot_K > 0).all() else (rate_K, rate_K)
    share_K, d_K = _share_and_deviation(acc_K, tot_K)
    d_RK = np.nan_to_num(_share_and_deviation(acc_RK, tot_RK)[1])
    # A bootstrap over C clusters understates the variance by (C - 1) / C.
    noise_RK = (d_RK - d_RK.mean(0)) * math.sqrt(clusters / (clusters - 1))
    noise = float(share_K @ noise_RK.var(0))

    def shrunk(d_K: Array) -> Array:
        square = (d_K**2) @ share_K
        kept = 1 - np.divide(noise, square, out=np.ones_like(square), where=square > noise)
        return np.asarray((np.abs(d_K) @ share_K) * np.sqrt(kept))

    value = float(shrunk(d_K))
    low, high = percentile_ends(shrunk(d_K * (value / lre if lre > 0 else 0.0) + noise_RK), clusters)
    debiased = Interval(value, min(low, value), max(high, value), clusters)
    low_K, high_K = np.fmin(low_K, ends[0]), np.fmax(high_K, ends[1])
    return LengthReweightingError(lre, debiased, floor, rate, rate_K, low_K, high_K)


def _share_and_deviation(accepted: Array, total: Array) -> tuple[Array, Array]:
    """p_b, and a_b / abar - 1, along the last axis; the second is 0 in an empty bin, nan where nothing was accepted."""
    whole = total.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = accepted.sum(-1, keepdims=True) / whole
        return total / whole, np.asarray(np.where(total > 0, accepted / total, rate) / rate - 1.0)
