"""Length fairness: acceptance by length bin, its error measures, their noise, and what they imply for the gradient."""

from __future__ import annotations

from fspo.fairness.bins import equal_mass_starts, merge_bins
from fspo.fairness.cosine import cosine, cosine_bound, dispersion_of_gradients, interaction_error, mean_cosine_bound
from fspo.fairness.interval import Interval, wilson_interval
from fspo.fairness.lre import LengthReweightingError, debiased_lre, length_reweighting_error, plain_lre

__all__ = [
    "Interval",
    "LengthReweightingError",
    "cosine",
    "cosine_bound",
    "debiased_lre",
    "dispersion_of_gradients",
    "equal_mass_starts",
    "interaction_error",
    "length_reweighting_error",
    "mean_cosine_bound",
    "merge_bins",
    "plain_lre",
    "wilson_interval",
]
