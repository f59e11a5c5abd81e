"""Length fairness: acceptance by length bin, its error measures and their noise."""

from __future__ import annotations

from fspo.fairness.bins import equal_mass_starts, merge_bins
from fspo.fairness.interval import Interval, wilson_interval
from fspo.fairness.lre import LengthReweightingError, debiased_lre, length_reweighting_error, plain_lre

__all__ = [
    "Interval",
    "LengthReweightingError",
    "debiased_lre",
    "equal_mass_starts",
    "length_reweighting_error",
    "merge_bins",
    "plain_lre",
    "wilson_interval",
]
