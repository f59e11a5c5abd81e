"""Clip rates and LREs by length from a run's length statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fspo.acceptance import acceptance_counts
from fspo.fairness import LengthReweightingError, equal_mass_starts, length_reweighting_error, merge_bins
from fspo.report.runs import Array, Run
from fspo.sums import FIELDS


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """Acceptance by length bin: ``length_K`` mean length of each bin, ``error`` rates, LRE and intervals."""

    length_K: Array
    error: LengthReweightingError
    sequences: int


def length_profile(
    runs: Sequence[Run],
    view: str = "symmetric",
    bins: int = 8,
    starts: npt.NDArray[np.int64] | None = None,
    resamples: int = 1000,
) -> LengthProfile | None:
    """Pool the mini-batches of runs and compute acceptance by length.

    Args:
        runs: Runs of one group.
        view: Which acceptance (:data:`fspo.acceptance.VIEWS`).
        bins: Length bins of equal mass wanted.
        starts: Bins to use instead, as fine bin indices, so that groups can share theirs.
        resamples: Bootstrap resamples over mini-batches.

    Returns:
        The profile; None where there are no sequences.
    """
    sums_MKF = np.concatenate([run.lengths.sums_MKF for run in runs]) if runs else np.zeros((0, 1, len(FIELDS)))
    count_K = sums_MKF[..., FIELDS.index("count")].sum(0)
    if count_K.sum() == 0:
        return None
    if starts is None:
        starts = equal_mass_starts(count_K, bins)
    counts = acceptance_counts(sums_MKF, view)
    error = length_reweighting_error(
        merge_bins(counts.accepted, starts),
        merge_bins(counts.total, starts),
        effective=None if counts.effective is None else merge_bins(counts.effective, starts),
        resamples=resamples,
    )
    count_J = merge_bins(count_K, starts)
    length_J = merge_bins(sums_MKF[..., FIELDS.index("length")].sum(0), starts)
    length_J = np.divide(length_J, count_J, out=np.full_like(length_J, np.nan), where=count_J > 0)
    return LengthProfile(length_J, error, int(count_K.sum()))


def shared_starts(runs: Sequence[Run], bins: int = 8) -> npt.NDArray[np.int64]:
    """Bins of equal mass over all runs together, for comparisons on the same bins."""
    counts = [run.lengths.sums_MKF[..., FIELDS.index("count")].sum(0) for run in runs]
    return equal_mass_starts(np.sum(counts, axis=0), bins)
