"""Merging fine bins into fewer bins of nearly equal mass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fspo.fairness.interval import Array


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

    Raises:
        ValueError: If ``n_bins`` < 1 or a total is negative or not finite.
    """
    total = np.asarray(total_K, dtype=np.float64)
    if n_bins < 1:
        raise ValueError(f"n_bins is {n_bins}; at least one bin is needed")
    if total.ndim != 1 or not np.isfinite(total).all() or (total < 0).any():
        raise ValueError("total_K must be a one-dimensional array of finite counts >= 0")
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
