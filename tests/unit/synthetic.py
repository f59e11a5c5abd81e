"""Synthetic sequence log-ratios that satisfy E_old[exp S] = 1, from one token to any length.

Samples come from pi_old, so the mean of exp(S) is 1 whatever the model. This forces a drift: S cannot have dispersion
without a negative mean. Short responses hide the drift, so bands are studied here on log-ratios for which the identity
holds *exactly*. Defined here.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from fspo.losses import acceptance_band
from fspo.sums import SequenceSums, length_bin, z_cell
from fspo.types import BandState, SequenceLossSettings

Array = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]


def gaussian_log_ratios(length_B: Lengths, sigma_B: Array | float, rng: np.random.Generator) -> Array:
    """``S ~ N(-sigma**2 * L / 2, sigma**2 * L)``: the Gaussian S of that dispersion with E[exp S] = 1."""
    variance_B = np.square(sigma_B) * length_B
    result: Array = rng.normal(-variance_B / 2, np.sqrt(variance_B))
    return result


def measured_acceptance(
    S_B: Array, length_B: Lengths, settings: SequenceLossSettings, state: BandState
) -> npt.NDArray[np.bool_]:
    """Whether each log-ratio lies inside its (closed) band."""
    lower_B, upper_B = acceptance_band(torch.from_numpy(length_B), settings, state, torch.float64)
    result: npt.NDArray[np.bool_] = (lower_B.numpy() <= S_B) & (upper_B.numpy() >= S_B)
    return result


def sums_of_log_ratios(S_B: Array, length_B: Lengths) -> SequenceSums:
    """Those columns of :class:`SequenceSums` that calibration reads, from S and L alone; the others stay 0."""
    sums = SequenceSums.zeros()
    S, L = torch.from_numpy(S_B), torch.from_numpy(length_B)
    root = L.double().sqrt()
    k, z = length_bin(L), S / root
    fields = {"count": torch.ones_like(S), "S": S, "z_squared": z * z, "length": L.double(), "length_sqrt": root}
    for name, values in fields.items():
        sums.column(name).index_add_(0, k, values)
    sums.hist_KH.index_put_((k, z_cell(z)), torch.ones_like(k), accumulate=True)
    return sums


def uneven_rollout_batch(rng: np.random.Generator, batch: int) -> list[tuple[Array, Lengths]]:
    """``(S_B, length_B)`` of each of the 4 mini-batches of a rollout batch whose dispersion is *not* sqrt(L).

    Like a small recorded run it has lengths from 1 to 220, a dispersion that is low below 20 tokens and high from 20 to
    60, and sequences of uneven scale (heavy tails). A common scale varies by rollout batch and grows with the position
    of the mini-batch, from 0 in the first.
    """
    level = 0.033 * math.exp(rng.normal(0.0, 0.15))
    result = []
    for position in range(4):
        length_B = np.clip(rng.gamma(2.2, 40.0, batch), 1, 220).astype(np.int64)
        shape_B = np.interp(np.log(length_B), np.log([1, 15, 35, 80, 220]), [0.5, 0.5, 1.45, 0.95, 0.9])
        sigma_B = level * position / 3 * shape_B * np.exp(rng.normal(0.0, 0.4, batch))
        result.append((gaussian_log_ratios(length_B, sigma_B, rng), length_B))
    return result
