"""Length fairness: the Length Reweighting Error and its sampling noise, intervals, and bins of nearly equal mass.

The paper names a Length Reweighting Error, but its formula was not available. Its definitions here are this
project's; docs/fairness.md explains them. With p_b the share of bin b, a_b its acceptance rate and
abar = sum_b p_b a_b the overall acceptance rate:

    LRE = sum_b p_b |a_b / abar - 1|        LRE_max = max_b |a_b / abar - 1|

LRE averages absolute values, so sampling noise biases it upward: eight bins of 600 sequences with a flat rate of 0.85
give a mean LRE of 0.013. Every estimate therefore comes with a noise floor, a debiased value and an interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        value: The estimate.
        low, high: Ends of the interval; nan where the data give none.
        n: Number of independent units behind it: seeds, problems or mini-batches, as the function that made it says.
    """

    value: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0

    def to_json(self) -> dict[str, float | None]:
        """``{value, low, high}``, with None in place of nan and infinity, which JSON does not have."""
        ends = {"value": self.value, "low": self.low, "high": self.high}
        return {name: end if math.isfinite(end) else None for name, end in ends.items()}


def lre_in_words(value: float, low: float, high: float) -> str:
    """A debiased LRE with its 95% interval; ``< high`` where the interval reaches 0, which excludes no even clip.

    The debiased value is cut at 0, so that without its interval noise would read as perfect evenness.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{value:.3f}"
    return f"{value:.3f} [{low:.3f}, {high:.3f}]" if round(low, 3) > 0 else f"< {high:.3f}"


def wilson_interval(rate: npt.ArrayLike, n: npt.ArrayLike) -> tuple[Array, Array]:
    """Wilson score interval (95%) of a binomial rate observed on ``n`` independent trials; nan at n = 0.

    The ends stay in [0, 1]. ``n`` need not be a whole number, which scipy's version requires. Source: E. B. Wilson,
    JASA 22 (1927).
    """
    z = NormalDist().inv_cdf(0.975)
    p, trials = np.asarray(rate, dtype=np.float64), np.asarray(n, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
        half = z / (1 + z * z / trials) * np.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2))
    return np.clip(centre - half, 0.0, 1.0), np.clip(centre + half, 0.0, 1.0)


def percentile_ends(drawn_R: npt.ArrayLike, n: int) -> tuple[float, float]:
    """Ends of the 95% interval of a statistic, from its values over resamples of ``n`` independent units.

    The expanded percentile interval: a bootstrap over n units understates the variance by (n - 1) / n and does not know
    that the variance itself is estimated. So it takes the percentiles at ``Phi(sqrt(n / (n - 1)) t)``, t the quantile
    of Student's distribution with n - 1 degrees of freedom. Values that are nan are left out; (nan, nan) if all are, or
    of one unit. Source: T. Hesterberg, The American Statistician 69 (2015), section 3.6.
    """
    # A quarter of a second, which the losses have no use for.
    from scipy.special import ndtr, stdtrit  # type: ignore[import-untyped]

    drawn = np.asarray(drawn_R, dtype=np.float64)
    if n < 2 or np.isnan(drawn).all():
        return float("nan"), float("nan")
    tail = ndtr(math.sqrt(n / (n - 1)) * stdtrit(n - 1, 0.025))
    low, high = np.nanquantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


def equal_mass_starts(total_K: npt.ArrayLike, n_bins: int = 8) -> npt.NDArray[np.int64]:
    """Where each of at most ``n_bins`` merged bins of nearly equal mass starts. Defined here.

    Fine bins are never split. Merged bin j ends at the fine-bin border whose cumulative mass is nearest to j / n_bins
    of the whole. Equal lengths therefore stay together. Where one fine bin holds more than 1 / n_bins of the mass, the
    result has fewer than ``n_bins`` bins, of unequal mass.

    Args:
        total_K: Sequences per fine bin, in order of length; zeros allowed.
        n_bins: Number of merged bins wanted.

    Returns:
        int64 [J], 1 <= J <= n_bins: index of the first fine bin of each merged bin, starting with 0. Every merged bin
        holds at least one sequence. Without any sequence there is one bin.
    """
    total = np.asarray(total_K, dtype=np.float64)
    cumulative = np.concatenate([[0.0], np.cumsum(total)])
    mass = cumulative[-1]
    if mass == 0:
        return np.zeros(1, dtype=np.int64)
    starts = [0]
    for j in range(1, n_bins):
        border = int(np.abs(cumulative - mass * j / n_bins).argmin())
        if cumulative[border] > cumulative[starts[-1]] and cumulative[border] < mass:
            starts.append(border)
    return np.asarray(starts, dtype=np.int64)


def merge_bins(values: npt.ArrayLike, starts: npt.NDArray[np.int64]) -> Array:
    """Sum fine bins (last axis) into the merged bins that begin at ``starts``."""
    return np.add.reduceat(np.asarray(values, dtype=np.float64), starts, axis=-1)


MIN_CLUSTERS: Final = 8
"""With fewer mini-batches the spread between them is too uncertain, and binomial noise is used instead."""
#: Rates this close to 1 count as 1: the share of a weight that a loss keeps carries rounding.
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class LengthReweightingError:
    """Result of :func:`length_reweighting_error`. All rates and errors are plain ratios (no unit).

    Attributes:
        lre: Plug-in LRE, biased upward by noise.
        lre_max: Largest |a_b / abar - 1| over the bins that hold sequences; biased upward too.
        debiased: LRE with the share that noise explains taken out, and its 95% interval; ``n`` is the number of
            mini-batches from which the noise was estimated, 0 where binomial noise was assumed.
        noise_variance: Variance of the deviations a_b / abar - 1 that noise explains, weighted by p_b.
        noise_floor: Mean LRE that flat rates would give with these counts.
        rate: Overall acceptance abar.
        rate_K: Acceptance by bin (nan in empty bins).
        rate_low_K, rate_high_K: Interval of the acceptance by bin: Wilson's, or the cluster bootstrap's ends where they
            lie further out. A bin in which all were accepted still gets an interval.
    """

    lre: float
    lre_max: float
    debiased: Interval
    noise_variance: float
    noise_floor: float
    rate: float
    rate_K: Array
    rate_low_K: Array
    rate_high_K: Array

    @property
    def is_informative(self) -> bool:
        """:func:`is_informative` of its rate."""
        return is_informative(self.rate)


def is_informative(rate: float) -> bool:
    """Whether an LRE at this overall acceptance means anything: nothing accepted leaves it undefined, nothing clipped
    makes it 0 whatever the band.
    """
    return 0 < rate < 1 - _ROUNDING


def plain_lre(accepted: npt.ArrayLike, total: npt.ArrayLike) -> tuple[Array, Array]:
    """LRE and LRE_max without any correction, along the last axis. Defined here.

    Args:
        accepted, total: Accepted and all sequences by bin, [..., K]. Empty bins do not count.

    Returns:
        (lre, lre_max), each [...]; nan where nothing was accepted or there is no sequence.
    """
    a, t = np.asarray(accepted, dtype=np.float64), np.asarray(total, dtype=np.float64)
    share, deviation = _share_and_deviation(a, t)
    return np.asarray(np.sum(share * np.abs(deviation), axis=-1)), np.asarray(np.max(np.abs(deviation), axis=-1))


def debiased_lre(accepted: Array, total: Array, noise_variance: float) -> Array:
    """LRE with noise taken out, along the last axis: ``lre * sqrt(max(0, 1 - noise_variance / sum p d^2))``.

    The formula of :func:`length_reweighting_error`, which measures the noise, for resampling.
    """
    share, deviation = _share_and_deviation(accepted, total)
    return np.asarray(np.sum(share * np.abs(deviation), axis=-1) * _shrink(deviation, share, noise_variance))


def length_reweighting_error(
    accepted: npt.ArrayLike,
    total: npt.ArrayLike,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> LengthReweightingError:
    """LRE of acceptance counts by bin, its noise floor, a debiased value and a confidence interval. Defined here.

    The sequences of one mini-batch share the policy's shift. So the noise is estimated by resampling whole mini-batches
    (cluster bootstrap) where there are counts of at least MIN_CLUSTERS of them. Otherwise it is the binomial noise of
    independent sequences, which is usually too small.

    * ``noise_floor``: mean LRE over simulated data sets with the flat rate abar and the same counts.
    * ``debiased``: with d_b = a_b / abar - 1 and s_b the standard error of d_b,
      ``lre * sqrt(max(0, 1 - sum_b p_b s_b**2 / sum_b p_b d_b**2))``. It is never negative. Where rates are exactly
      flat, about a quarter of the noise floor remains.
    * its interval: percentiles of the debiased value over resamples, which are drawn around deviations shrunk by the
      same factor. Otherwise the noise of the data would count twice.

    Args:
        accepted: Accepted sequences by bin, [K] or by mini-batch [M, K].
        total: All sequences by bin, same shape.
        resamples: Number of bootstrap resamples and simulated data sets.
        seed: Of the random numbers; equal arguments give equal results.

    Returns:
        The estimate. Where nothing was accepted, or there is no sequence, LRE is undefined and nan.

    Raises:
        ValueError: If shapes differ, a value is negative or not finite, or accepted exceeds total.
    """
    acc_MK, tot_MK = _validated(accepted, total)
    rng = np.random.default_rng(seed)
    acc_K, tot_K = acc_MK.sum(0), tot_MK.sum(0)
    filled = tot_K > 0
    rate_K = np.divide(acc_K, tot_K, out=np.full_like(tot_K, np.nan), where=filled)
    whole = tot_K.sum()
    if whole == 0 or acc_K.sum() == 0:
        nan, nan_K = float("nan"), np.full_like(tot_K, np.nan)
        rate = 0.0 if whole else nan
        return LengthReweightingError(nan, nan, Interval(nan, nan, nan, 0), nan, nan, rate, rate_K, nan_K, nan_K)
    rate = acc_K.sum() / whole
    share_K, d_K = _share_and_deviation(acc_K, tot_K)
    lre, lre_max = (float(x) for x in plain_lre(acc_K, tot_K))

    def draws(rate_K: Array | float) -> Array:
        """Accepted by bin, [resamples, K], with independent sequences."""
        return rng.binomial(tot_K.astype(np.int64), rate_K, (resamples, len(tot_K))).astype(np.float64)

    flat_lre = np.nan_to_num(plain_lre(draws(rate), tot_K)[0])
    clusters = int((tot_MK.sum(1) > 0).sum())
    if clusters >= MIN_CLUSTERS:
        drawn_RM = rng.multinomial(len(tot_MK), np.full(len(tot_MK), 1.0 / len(tot_MK)), resamples).astype(np.float64)
        boot_acc, boot_tot = drawn_RM @ acc_MK, drawn_RM @ tot_MK
        # A bootstrap over M clusters understates the variance by (M - 1) / M.
        stretch = float(np.sqrt(clusters / (clusters - 1)))
    else:
        clusters, stretch = 0, 1.0
        boot_acc = draws(np.nan_to_num(rate_K))
        boot_tot = np.broadcast_to(tot_K, boot_acc.shape)
    boot_d = np.nan_to_num(_share_and_deviation(boot_acc, boot_tot)[1])
    noise_RK = np.where(filled, (boot_d - boot_d.mean(0)) * stretch, 0.0)
    noise_var = float(share_K @ np.var(noise_RK, axis=0))
    shrink = float(_shrink(d_K, share_K, noise_var))
    debiased = float(lre * shrink)
    world_RK = d_K * shrink + noise_RK
    world = (np.abs(world_RK) @ share_K) * _shrink(world_RK, share_K, noise_var)
    low, high = (float(end) for end in np.percentile(world, [2.5, 97.5]))
    rate_low_K, rate_high_K = _rate_interval(rate_K, tot_K, boot_acc, boot_tot)
    return LengthReweightingError(
        lre=lre,
        lre_max=lre_max,
        debiased=Interval(debiased, min(low, debiased), max(high, debiased), clusters),
        noise_variance=noise_var,
        noise_floor=float(np.mean(flat_lre)),
        rate=float(rate),
        rate_K=rate_K,
        rate_low_K=rate_low_K,
        rate_high_K=rate_high_K,
    )


def _validated(accepted: npt.ArrayLike, total: npt.ArrayLike) -> tuple[Array, Array]:
    acc, tot = np.asarray(accepted, dtype=np.float64), np.asarray(total, dtype=np.float64)
    if acc.shape != tot.shape or acc.ndim not in (1, 2) or acc.size == 0:
        raise ValueError(f"accepted {acc.shape} and total {tot.shape} must have one shape, [K] or [mini-batches, K]")
    if not (np.isfinite(acc).all() and np.isfinite(tot).all() and (acc >= 0).all() and (tot >= 0).all()):
        raise ValueError("accepted and total must be finite and >= 0")
    # Shares of a weight add up to their total only to rounding.
    if (acc > tot * (1 + 1e-9)).any():
        raise ValueError("accepted exceeds total in at least one bin")
    return np.atleast_2d(np.minimum(acc, tot)), np.atleast_2d(tot)


def _share_and_deviation(accepted: Array, total: Array) -> tuple[Array, Array]:
    """p_b, and a_b / abar - 1, along the last axis; the second is 0 in an empty bin, nan where nothing was accepted."""
    whole = total.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = accepted.sum(-1, keepdims=True) / whole
        return total / whole, np.asarray(np.where(total > 0, accepted / total, rate) / rate - 1.0)


def _shrink(deviation: Array, share: Array, noise_var: float) -> Array:
    observed = (share * deviation**2).sum(-1)
    explained = np.divide(noise_var, observed, out=np.ones_like(observed), where=observed > noise_var)
    return np.asarray(np.sqrt(1.0 - explained))


def _rate_interval(rate_K: Array, n_K: Array, acc_RK: Array, tot_RK: Array) -> tuple[Array, Array]:
    low_K, high_K = wilson_interval(rate_K, n_K)
    for k in np.flatnonzero(~np.isnan(rate_K)):
        seen_R = tot_RK[:, k] > 0
        if seen_R.any():
            low, high = np.percentile(acc_RK[seen_R, k] / tot_RK[seen_R, k], [2.5, 97.5])
            low_K[k], high_K[k] = min(low_K[k], low), max(high_K[k], high)
    return low_K, high_K
