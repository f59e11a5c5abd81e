"""The definitions ("views") of when a sequence counts as accepted. Defined here.

No claim about fairness should rest on one view alone; diagnostics and reports give all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fspo.fairness import LengthReweightingError, length_reweighting_error, merge_bins
from fspo.sums import FIELDS, FINE_LENGTH_EDGES, SequenceSums

Array = npt.NDArray[np.float64]

VIEWS: Final[dict[str, str]] = {
    "symmetric": "S inside the band, whatever the sign of the advantage; share of sequences",
    "active": "gradient not removed by the clip (not: S above and A > 0, nor S below and A < 0); share of sequences",
    "active_nonzero_advantage": "active, over the sequences whose advantage is not zero: the others have no gradient",
    "mass": "share of the algorithm's weight kept, sum(w * accepted) / sum(w)",
    "ratio_mass": "share of the importance ratio kept, sum(exp(S) * accepted) / sum(exp(S)), whatever the weight",
    "nonzero_advantage": "symmetric, over the sequences whose advantage is not zero",
    "untruncated": "symmetric, over the sequences that ended by themselves",
}
"""Name of each view and what it counts."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Accepted and all, [mini-batch, bin]; ``squared`` is the sum of the squared weights of importance masses."""

    accepted: Array
    total: Array
    squared: Array | None = None

    def error(self, starts: npt.NDArray[np.int64], resamples: int = 1000) -> LengthReweightingError:
        """:func:`fspo.fairness.length_reweighting_error` over the merged bins that begin at ``starts``."""
        squared = None if self.squared is None else merge_bins(self.squared, starts)
        accepted, total = merge_bins(self.accepted, starts), merge_bins(self.total, starts)
        return length_reweighting_error(accepted, total, squared=squared, resamples=resamples)


def stack_sums(parts: Sequence[SequenceSums]) -> Array:
    """The sums of several mini-batches as one array [M, K, F]; [0, K, F] for none."""
    if not parts:
        return np.zeros((0, len(FINE_LENGTH_EDGES) - 1, len(FIELDS)))
    return np.stack([part.sums_KF.numpy() for part in parts])


def acceptance_counts(sums_MKF: Array, view: str = "symmetric") -> Counts:
    """Acceptance by fine length bin under one view.

    Args:
        sums_MKF: Sums of each mini-batch (:func:`stack_sums`), columns as in :data:`fspo.sums.FIELDS`.
        view: A key of VIEWS.

    Returns:
        Counts with arrays [M, K].

    Raises:
        KeyError: If the view is unknown.
    """

    def column(name: str) -> Array:
        return sums_MKF[..., FIELDS.index(name)]

    count, accepted = column("count"), column("accepted")
    if view == "symmetric":
        return Counts(accepted, count)
    if view == "active":
        return Counts(count - column("clipped_high") - column("clipped_low"), count)
    if view == "active_nonzero_advantage":
        total = count - column("advantage_zero")  # the clip is never active where A = 0
        return Counts(total - column("clipped_high") - column("clipped_low"), total)
    if view == "mass":
        return Counts(column("weight_accepted"), column("weight"), column("weight_squared"))
    if view == "ratio_mass":
        return Counts(column("ratio_accepted"), column("ratio"), column("ratio_squared"))
    if view == "nonzero_advantage":
        return Counts(accepted - column("advantage_zero_accepted"), count - column("advantage_zero"))
    if view == "untruncated":
        return Counts(accepted - column("truncated_accepted"), count - column("truncated"))
    raise KeyError(f"unknown view {view!r} of acceptance; known: {', '.join(VIEWS)}")
