"""The records of the length funnel in a run folder, ``funnel.jsonl``: which responses ended where, by length.

Everything that removes responses by length changes which lengths the update sees, exactly as an uneven clip does; so a
report gives each stage an acceptance rate by length and its Length Reweighting Error. Defined here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.fairness.lre import Array, LengthReweightingError, length_reweighting_error, merge_bins
from fspo.length_bins import FINE_BINS
from fspo.reading import COUNT, Kind, check_fields, list_of, object_of

#: Where a response ends: the stages in the order in which it passes them.
STAGES: Final = ("failed", "stale", "filtered", "surplus", "trained")
#: What is summed over the responses that were trained on.
SUMMED: Final = ("staleness", "versions")
_K: Final = FINE_BINS
Bins = npt.NDArray[np.int64]
_UNKNOWN: Final = Kind("-1", lambda value: value == -1)
_ROW: Final = Kind(
    f"a fine bin (-1: not known), then {len(STAGES) + len(SUMMED)} counts",
    lambda row: (
        isinstance(row, list)
        and len(row) == 1 + len(STAGES) + len(SUMMED)
        and (COUNT | _UNKNOWN).holds(row[0])
        and row[0] < _K
        and all(map(COUNT.holds, row[1:]))
    ),
)
_RECORD: Final = {"rows": list_of(_ROW), "tokens": object_of(dict.fromkeys(STAGES, COUNT), needed=STAGES)}


@dataclass(frozen=True, slots=True)
class FunnelSteps:
    """Records of a run's steps as arrays; the columns of ``ended_MSK`` are the fine length bins, the last: not known.

    Attributes:
        ended_MSK: Responses that ended, by step, stage and fine length bin, [M, S, K + 1].
        tokens_MS: Tokens of those whose length is known.
        staleness_MK, versions_MK: Sums over the responses trained on, [M, K].
    """

    ended_MSK: Array
    tokens_MS: Array
    staleness_MK: Array
    versions_MK: Array

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> FunnelSteps:
        """From the lines of ``funnel.jsonl``.

        Raises:
            KeyError, TypeError, ValueError, IndexError: If a record is none.
        """
        columns_MCK = np.zeros((len(records), len(STAGES) + len(SUMMED), _K + 1))
        for columns_CK, record in zip(columns_MCK, records, strict=True):
            for k, *columns in check_fields(dict(record), _RECORD, needed=tuple(_RECORD))["rows"]:
                columns_CK[:, k] = columns
        tokens_MS = np.array([[record["tokens"][stage] for stage in STAGES] for record in records], dtype=np.float64)
        staleness_MK, versions_MK = columns_MCK[:, len(STAGES) :, :-1].swapaxes(0, 1)
        return cls(columns_MCK[:, : len(STAGES)], tokens_MS.reshape(-1, len(STAGES)), staleness_MK, versions_MK)

    @classmethod
    def join(cls, parts: Sequence[FunnelSteps]) -> FunnelSteps:
        """The steps of several runs, one after another."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def stage_fairness(ended_MSK: Array, starts: Bins) -> dict[str, LengthReweightingError]:
    """LRE of passing each stage that removed a response, and of the whole (``kept``); nothing if none removed any.

    With n_sb the responses of length bin b that ended in stage s, those that reach s are the sum over s' >= s of n_s'b,
    in the order of STAGES, and the rate of passing it is 1 - n_sb / reach_sb. The whole: trained over finished.

    Args:
        ended_MSK: Responses that ended, by step, stage and fine length bin, [M, S, K].
        starts: Length bins, as first fine bins.
    """
    merged_MSK = merge_bins(ended_MSK, starts)
    errors: dict[str, LengthReweightingError] = {}
    reach_MSK = merged_MSK[:, ::-1].cumsum(1)[:, ::-1]
    for index, stage in enumerate(STAGES[:-1]):
        if merged_MSK[:, index].any():
            passed_MK = reach_MSK[:, index] - merged_MSK[:, index]
            errors[stage] = length_reweighting_error(passed_MK, reach_MSK[:, index])
    if errors:
        errors["kept"] = length_reweighting_error(merged_MSK[:, -1], reach_MSK[:, 0])
    return errors
