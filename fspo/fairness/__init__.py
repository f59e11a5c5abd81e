"""Length fairness: acceptance by length bin, its error measures and their noise."""

from __future__ import annotations

from fspo.fairness.lre import LengthReweightingError, debiased_lre, length_reweighting_error, plain_lre
from fspo.fairness.stats import Array, Interval, equal_mass_starts, merge_bins, wilson_interval

__all__ = [
    "Array",
    "Interval",
    "LengthReweightingError",
    "debiased_lre",
    "equal_mass_starts",
    "length_reweighting_error",
    "merge_bins",
    "plain_lre",
    "wilson_interval",
]
