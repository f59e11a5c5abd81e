"""Bands on the same recorded responses ("common records"), with their own and with equally wide clip values.

An algorithm's own runs differ from the others' in more than the band: after the first step each trains another policy.
On common records only the band differs. All responses outside count, whatever their advantage: the symmetric view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fspo.clip import needed_scale, scale_for
from fspo.fairness.lre import LengthReweightingError, length_reweighting_error
from fspo.report.groups import LengthProfile, RunGroup, shared_starts
from fspo.report.tables import Table, lre_interval
from fspo.responses import Responses
from fspo.types import SequenceLossSettings

_NO_EDGES = "(measured band, no clip value, or one of 0)"


def common_records(groups: Sequence[RunGroup], accept: float) -> dict[tuple[str, bool, str], LengthReweightingError]:
    """The LRE by band, whether its clip values are matched, and records: each group's band on each group's records.

    All bands are judged over the length bins of the records. A band has its own clip values, and those with which the
    share ``accept`` of these records lies inside. Bands that depend on measurements during training have no fixed edges
    and are left out. So are bands with a clip value of 0, which no factor scales.
    """
    bands: dict[str, SequenceLossSettings] = {}
    for group in groups:
        settings = next((s for run in group.runs if (s := run.loss_settings) is not None), None)
        if settings is not None and not settings.needs_state and min(settings.c_low, settings.c_high) > 0:
            bands[group.algo] = settings
    errors = {}
    for group in groups:
        responses, starts = Responses.join([run.responses for run in group.runs]), shared_starts(group.runs)
        if not len(responses):
            continue
        total_MJ = responses.by_batch(np.ones_like(responses.s_B), starts)
        for band, settings in bands.items():
            needed_B = needed_scale(responses.s_B, responses.length_B, settings)
            scales = {False: 1.0, True: scale_for(needed_B, accept)}
            for matched, scale in scales.items():
                if scale > 0:
                    inside_MJ = responses.by_batch((needed_B <= scale).astype(np.float64), starts)
                    errors[band, matched, group.algo] = length_reweighting_error(inside_MJ, total_MJ)
    return errors


def common_record_table(
    groups: Sequence[RunGroup], profiles: Mapping[str, LengthProfile | None], accept: float
) -> Table | None:
    """Debiased LRE of each group's band (rows) on the records of each group (columns); its own as in ``profiles``."""
    errors = common_records(groups, accept)
    errors |= {(algo, False, algo): profile.error for algo, profile in profiles.items() if profile}
    sources = list(dict.fromkeys(source for _, _, source in errors))
    rows = []
    for clips in ("own", "matched"):
        for group in groups:
            known = [errors.get((group.algo, clips == "matched", source)) for source in sources]
            cells = [f"{lre_interval(e)} at acceptance {e.rate:.2f}" if e else _NO_EDGES for e in known]
            rows.append((f"{group.algo}, {clips} clips", "", cells))
    return Table([f"on {source}'s records" for source in sources], rows) if sources else None
