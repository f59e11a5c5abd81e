"""Bands of different shape on the same recorded sequences ("common records"), with default and with matched clips.

An algorithm's own runs differ from the others' in more than the band: after the first step each trains another policy.
On common records only the band differs. Acceptance is recomputed from the recorded histograms of z = S / sqrt(L).
Histograms hold no advantages, so it is the symmetric acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fspo.fairness import LengthReweightingError, length_reweighting_error, merge_bins
from fspo.matching import Sequences, match_clip, needed_factor
from fspo.report.groups import RunGroup
from fspo.report.runs import Array, Run
from fspo.sums import FIELDS, FINE_LENGTH_EDGES
from fspo.types import SequenceLossSettings

MATCHED_CLIP_RATE: Final = 0.15


@dataclass(frozen=True, slots=True)
class CommonRecord:
    """LRE of one band on one group's records."""

    band: str
    matched: bool
    records: str
    error: LengthReweightingError


def common_records(groups: Sequence[RunGroup], starts: npt.NDArray[np.int64]) -> list[CommonRecord]:
    """The band of each group on the records of each group, with its own clips and at :data:`MATCHED_CLIP_RATE`.

    Clip values are matched on the records of the group. Bands that depend on measurements during training have no fixed
    edges to evaluate and are left out. So are bands with a clip value of 0, which no factor scales.
    """
    bands: dict[str, SequenceLossSettings] = {}
    for group in groups:
        settings = next((s for run in group.runs if (s := run.loss_settings) is not None), None)
        if settings is None or settings.needs_state:
            continue
        if min(settings.clip_low, settings.clip_high) > 0:
            bands[group.algo] = settings
    found: list[CommonRecord] = []
    for group in groups:
        parts = [part for run in group.runs for part in _minibatches(run)]
        if not parts:
            continue
        pooled = Sequences(
            *(np.concatenate([getattr(part, f) for part, _ in parts]) for f in ("log_ratio_B", "length_B", "count_B"))
        )
        for band, settings in bands.items():
            try:
                matched = match_clip(pooled, settings, MATCHED_CLIP_RATE).settings
            except ValueError:
                matched = None
            for chosen in (settings, matched):
                if chosen is not None:
                    error = _error(parts, chosen, starts)
                    found.append(CommonRecord(band, chosen is matched, group.algo, error))
    return found


def _minibatches(run: Run) -> list[tuple[Sequences, npt.NDArray[np.int64]]]:
    parts = []
    for sums_KF, cells in zip(run.lengths.sums_MKF, run.lengths.cells_M, strict=True):
        if len(cells):
            length_K = sums_KF[:, FIELDS.index("length")] / np.maximum(sums_KF[:, FIELDS.index("count")], 1)
            parts.append(Sequences.from_cells(cells, length_K))
    return parts


def _error(
    parts: Sequence[tuple[Sequences, npt.NDArray[np.int64]]],
    settings: SequenceLossSettings,
    starts: npt.NDArray[np.int64],
) -> LengthReweightingError:
    size = len(FINE_LENGTH_EDGES) - 1
    accepted_MK: list[Array] = []
    total_MK: list[Array] = []
    for part, bin_B in parts:
        inside = needed_factor(part, settings) <= 1
        accepted_MK.append(np.bincount(bin_B, part.count_B * inside, size).astype(np.float64))
        total_MK.append(np.bincount(bin_B, part.count_B, size).astype(np.float64))
    return length_reweighting_error(merge_bins(accepted_MK, starts), merge_bins(total_MK, starts))
