"""An estimate with its confidence interval, and the interval of a binomial rate."""

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
