"""Acceptance bands on the sequence log-ratio S, as functions of the length L.

A band is ``[centre - half_low(L), centre + half_high(L)]``. The algorithms differ in how the half-widths grow: not at
all (sequence-level RLOO), like sqrt(L) (FSPO, arXiv 2509.09177) or like L (GSPO, arXiv 2507.18071).
"""

from __future__ import annotations

import math

import torch

from fspo.sums import FINE_LENGTH_EDGES
from fspo.types import BandState, SequenceLossSettings


def acceptance_band(
    length_B: torch.Tensor,
    settings: SequenceLossSettings,
    state: BandState | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The acceptance band on S for sequences of the given lengths.

    With the centre ``mu = -L * kl`` (``drift="kl"``; otherwise 0), and eps and c the clip values:

    ============ ============================================== =====================================
    band         [lower, upper] - mu                            source
    ============ ============================================== =====================================
    ``constant`` [log(1 - eps_low), log(1 + eps_high)]          sequence-level RLOO
    ``sqrt``     [-c_low * sqrt(L), c_high * sqrt(L)]           FSPO, arXiv 2509.09177
    ``linear``   [L * log(1 - eps_low), L * log(1 + eps_high)]  GSPO, arXiv 2507.18071
    ``quantile`` -+ half_width[bin of L] * sqrt(L)              defined here
    ``active``   -+ (a + b * sqrt(L)), (a, b) = active_line     defined here
    ============ ============================================== =====================================

    The half-widths of ``quantile`` are looked up, not interpolated. The fine bins are narrow (a factor of 2**(1/8)),
    their values are already smoothed over neighbouring bins (:mod:`fspo.calibration`), and acceptance is counted in the
    same bins.

    Args:
        length_B: Lengths in tokens, at least 1, int64.
        settings: Which band.
        state: Measured drift and widths. Before any data (or None) there is no drift, and ``quantile`` and ``active``
            are the ``sqrt`` band.
        dtype: Floating type of the result.

    Returns:
        ``(centre_B, lower_B, upper_B)`` in nats, with ``lower_B <= centre_B <= upper_B``.
    """
    state = state or BandState()
    length = length_B.to(dtype)
    centre_B = length * -state.drift_per_token if settings.drift == "kl" else torch.zeros_like(length)
    if settings.band in ("constant", "linear"):
        low, high = -math.log1p(-settings.clip_low), math.log1p(settings.clip_high)
        growth_B = length if settings.band == "linear" else torch.ones_like(length)
        return centre_B, centre_B - low * growth_B, centre_B + high * growth_B
    root_B = length.sqrt()
    if settings.band == "quantile" and state.half_width_K:
        edges = FINE_LENGTH_EDGES.to(length_B.device)
        widths_K = torch.tensor(state.half_width_K, dtype=dtype, device=length_B.device)
        half_B = widths_K[torch.bucketize(length_B, edges, right=True) - 1] * root_B
    elif settings.band == "active" and state.active_line is not None:
        half_B = state.active_line[0] + state.active_line[1] * root_B
    else:
        return centre_B, centre_B - settings.clip_low * root_B, centre_B + settings.clip_high * root_B
    return centre_B, centre_B - half_B, centre_B + half_B
