"""Bands of different shape on the same recorded sequences ("common records"), with default and with matched clips.

An algorithm's own runs differ from the others' in more than the band: after the first step each trains another policy.
On common records only the band differs. Acceptance is recomputed from the recorded histograms of z = S / sqrt(L).
Histograms hold no advantages, so it is the symmetric acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fspo.fairness.lre import LengthReweightingError, length_reweighting_error, merge_bins
from fspo.matching import Sequences, match_clip, needed_factor
from fspo.report.groups import LengthProfile, RunGroup, shared_starts
from fspo.report.runs import Run
from fspo.report.tables import Table, lre_interval
from fspo.sums import FIELDS, FINE_LENGTH_EDGES
from fspo.types import SequenceLossSettings

MATCHED_CLIP_RATE: Final = 0.15
_NO_EDGES: Final = "(the band's edges are not in the records, or out of reach)"
_K: Final = len(FINE_LENGTH_EDGES) - 1

Part = tuple[Sequences, npt.NDArray[np.int64]]
"""The sequences of a mini-batch, and the fine length bin of each."""


def common_records(groups: Sequence[RunGroup]) -> dict[tuple[str, bool, str], LengthReweightingError]:
    """The LRE by band, whether its clip values are matched, and records: each group's band on each group's records.

    All bands are judged over the length bins of the records.

    A band has its own clip values, and those that clip :data:`MATCHED_CLIP_RATE` of these records. Bands that depend on
    measurements during training have no fixed edges to evaluate and are left out. So are bands with a clip value of 0,
    which no factor scales.
    """
    bands: dict[str, SequenceLossSettings] = {}
    for group in groups:
        settings = next((s for run in group.runs if (s := run.loss_settings) is not None), None)
        if settings is not None and not settings.needs_state and min(settings.c_low, settings.c_high) > 0:
            bands[group.algo] = settings
    errors = {}
    for group in groups:
        parts = [part for run in group.runs for part in _minibatches(run)]
        if not parts:
            continue
        names = ("log_ratio_B", "length_B", "count_B")
        starts = shared_starts(group.runs)
        pooled = Sequences(*(np.concatenate([getattr(part, name) for part, _ in parts]) for name in names))
        for band, settings in bands.items():
            errors[band, False, group.algo] = _error(parts, settings, starts)
            try:
                matched = match_clip(pooled, settings, MATCHED_CLIP_RATE).settings
            except ValueError:  # out of its reach
                continue
            errors[band, True, group.algo] = _error(parts, matched, starts)
    return errors


def common_record_table(groups: Sequence[RunGroup], profiles: Mapping[str, LengthProfile | None]) -> Table | None:
    """Debiased LRE of each group's band (rows) on the records of each group (columns); its own as in ``profiles``."""
    errors = common_records(groups)
    errors |= {(algo, False, algo): profile.error for algo, profile in profiles.items() if profile}
    sources = list(dict.fromkeys(source for _, _, source in errors))
    rows = []
    for clips in ("own", "matched"):
        for group in groups:
            known = [errors.get((group.algo, clips == "matched", source)) for source in sources]
            cells = [f"{lre_interval(e)} at acceptance {e.rate:.2f}" if e else _NO_EDGES for e in known]
            rows.append((f"{group.algo}, {clips} clips", "", cells))
    return Table([f"on {source}'s records" for source in sources], rows) if sources else None


def _minibatches(run: Run) -> list[Part]:
    parts = []
    for sums_KF, cells in zip(run.lengths.sums_MKF, run.lengths.cells_M, strict=True):
        if len(cells):
            length_K = sums_KF[:, FIELDS.index("length")] / np.maximum(sums_KF[:, FIELDS.index("count")], 1)
            parts.append(Sequences.from_cells(cells, length_K))
    return parts


def _error(
    parts: Sequence[Part], settings: SequenceLossSettings, starts: npt.NDArray[np.int64]
) -> LengthReweightingError:
    inside = [needed_factor(part, settings) <= 1 for part, _ in parts]
    accepted_MK = [np.bincount(k, part.count_B * kept, _K) for (part, k), kept in zip(parts, inside, strict=True)]
    total_MK = [np.bincount(k, part.count_B, _K) for part, k in parts]
    return length_reweighting_error(merge_bins(accepted_MK, starts), merge_bins(total_MK, starts))
