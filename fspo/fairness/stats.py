"""An estimate with its interval, the interval of a binomial rate, and bins of nearly equal mass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

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
