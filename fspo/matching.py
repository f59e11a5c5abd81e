"""Matched clip values: those at which bands of different shape clip the same share of the same sequences.

They answer a question of the paper's reviewers: does a band grow with length in a better way, or is it only wider? Each
algorithm keeps the shape of its band and the ratio of its two clip values. Both clip values are scaled by one factor,
so that the overall clip rate on given sequences is the target: the share outside the band, or, where the advantages are
given, the active one, the share of the sequences with A != 0 whose gradient the clip removes. Defined here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fspo.clip_values import needed_scale, scaled
from fspo.fairness.lre import Array
from fspo.sums import Z_EDGES
from fspo.types import SequenceLossSettings

POINTS_PER_CELL: Final = 16
_GOLDEN: Final = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Sequences:
    """Recorded sequences: log-ratio S (nats), length L (tokens), and the number of sequences of each entry.

    With ``advantage_B``, none of which is 0, a clip counts only where it removes the gradient: where S lies outside on
    the side to which A pushes.
    """

    log_ratio_B: Array
    length_B: Array
    count_B: Array
    advantage_B: Array | None = None

    def __post_init__(self) -> None:
        if self.count_B.sum() <= 0:
            raise ValueError("no sequences to calibrate on; record at least one mini-batch other than the first")

    @classmethod
    def from_pairs(
        cls, log_ratio_B: npt.ArrayLike, length_B: npt.ArrayLike, advantage_B: npt.ArrayLike | None = None
    ) -> Sequences:
        """From one S and one L per sequence; with A each, for the active clip rate, without those of A = 0."""
        s, length = np.asarray(log_ratio_B, dtype=np.float64), np.asarray(length_B, dtype=np.float64)
        if advantage_B is None:
            return cls(s, length, np.ones_like(s))
        advantage = np.asarray(advantage_B, dtype=np.float64)
        used = advantage != 0
        return cls(s[used], length[used], np.ones(int(used.sum())), advantage[used])

    @classmethod
    def from_cells(
        cls, cells: npt.NDArray[np.int64], length_K: Array, points: int = POINTS_PER_CELL
    ) -> tuple[Sequences, npt.NDArray[np.int64]]:
        """From a histogram's filled cells (fine length bin, cell of Z_EDGES, sequences) and each bin's mean length.

        The sequences of a cell are spread evenly over log |z|, by ``points`` entries; a single one is elsewhere in each
        cell, so that many cells together are spread evenly. Clip values matched this way are within a few per cent
        of those from pairs.

        Returns:
            The sequences, and the fine length bin of each entry.
        """
        k, h, count = cells.T
        edges = Z_EDGES.numpy()
        low, high = np.clip(edges[h], edges[1], edges[-2]), np.clip(edges[h + 1], edges[1], edges[-2])
        shift = 0.5 if points > 1 else np.arange(len(k))[:, None] * _GOLDEN % 1
        part = (np.arange(points) + shift) / points
        # A cell with an edge at 0 holds |z| < 1e-6 or z == 0: its middle is exact enough.
        near_zero = (low == 0) | (high == 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.sign(low + high)[:, None] * np.abs(low)[:, None] ** (1 - part) * np.abs(high)[:, None] ** part
        z = np.where(near_zero[:, None], ((low + high) / 2)[:, None], spread)
        length, share = np.repeat(length_K[k], points), np.repeat(count / points, points)
        return cls(z.ravel() * np.sqrt(length), length, share), np.repeat(k, points)


@dataclass(frozen=True, slots=True)
class MatchedClip:
    """Settings with matched clip values, the factor on the clip values, and the clip rate on the given sequences."""

    settings: SequenceLossSettings
    factor: float
    clip_rate: float


def needed_factor(sequences: Sequences, settings: SequenceLossSettings, drift_per_token: float = 0.0) -> Array:
    """The smallest factor on both clip values at which each sequence is accepted, [B].

    It is :func:`fspo.clip_values.needed_scale`, and 0 where A is given and A x <= 0: the clip removes nothing there.

    Args:
        sequences: Recorded sequences.
        settings: Band and clip values; a band that is not measured.
        drift_per_token: kl >= 0 (nats per token), used if the settings centre the band at -L * kl.

    Raises:
        ValueError: If a clip value is 0, which cannot be scaled.
    """
    needed = needed_scale(sequences.log_ratio_B, sequences.length_B, settings, drift_per_token)
    if sequences.advantage_B is None:
        return needed
    x = sequences.log_ratio_B + (sequences.length_B * drift_per_token if settings.drift == "kl" else 0.0)
    return np.where(sequences.advantage_B * x > 0, needed, 0.0)


def match_clip(
    sequences: Sequences, settings: SequenceLossSettings, target_clip_rate: float, drift_per_token: float = 0.0
) -> MatchedClip:
    """Scale the clip values so that a given share of the sequences lies outside the band.

    Args:
        sequences: Recorded sequences; the same ones for all algorithms of a comparison.
        settings: The algorithm; its ratio of c_low to c_high is kept.
        target_clip_rate: Share of sequences outside the band, or with advantages the share whose gradient the clip
            removes, in (0, 1).
        drift_per_token: As in :func:`needed_factor`.

    Returns:
        New settings. Where equal sequences make an exact match impossible, the clip rate is the largest one not above
        the target. A measured band gets ``target_acceptance = 1 - target_clip_rate``, and the target as its clip
        rate. With advantages it gets the share of these sequences that lies inside the sqrt(L) band with that active
        clip rate. The clip values of that band are its own for the first rollout batch.

    Raises:
        ValueError: If ``target_clip_rate`` is not in (0, 1), if at least 1 - target_clip_rate of the sequences have
            S = centre (then any clip value would do), or as in :func:`needed_factor`.
    """
    if not 0 < target_clip_rate < 1:
        raise ValueError(f"target_clip_rate={target_clip_rate!r} must lie strictly between 0 and 1")
    if settings.calibrated:
        acceptance = 1 - target_clip_rate
        plain = dataclasses.replace(settings, band="power", c_low=1.0, c_high=1.0, target_acceptance=None)
        c = match_clip(sequences, plain, target_clip_rate, drift_per_token).factor
        if sequences.advantage_B is not None:
            either_side = dataclasses.replace(sequences, advantage_B=None)
            inside = needed_factor(either_side, plain, drift_per_token) <= c
            acceptance = float(sequences.count_B[inside].sum() / sequences.count_B.sum())
        matched = dataclasses.replace(settings, c_low=c, c_high=c, target_acceptance=acceptance)
        return MatchedClip(matched, float("nan"), target_clip_rate)
    needed = needed_factor(sequences, settings, drift_per_token)
    order = np.argsort(needed, kind="stable")
    accepted = np.cumsum(sequences.count_B[order])
    whole = accepted[-1]
    index = int(np.searchsorted(accepted, (1 - target_clip_rate) * whole * (1 - 1e-12)))
    smallest = float(needed[order][index])
    if smallest <= 0:
        raise ValueError(
            f"{accepted[index] / whole:.1%} of the sequences have S at the band's centre, or where nothing is clipped, "
            f"so no clip value gives a clip rate of {target_clip_rate:g}; leave out the first mini-batch of each step"
        )
    # Half-way to the next sequence, so that rounding cannot push the last accepted one out of the band.
    above = needed[order][np.searchsorted(needed[order], smallest, side="right") :]
    factor = float((smallest + above[0]) / 2) if above.size else smallest * (1 + 1e-6)
    clip_rate = float(sequences.count_B[needed > factor].sum() / whole)
    return MatchedClip(scaled(settings, factor), factor, clip_rate)
