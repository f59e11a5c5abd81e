"""The length funnel: where every response that was started ends, by length. Defined here.

A response ends in exactly one stage:

* ``failed``: no usable response came of it, or its group was given up because another response of it failed;
* ``stale``: finished, but its prompt was issued too many policy versions ago;
* ``filtered``: finished, but removed by group filtering (all rewards of its group are equal);
* ``surplus``: finished and usable, but more than the batch needed;
* ``trained``: used in an update.

A response that more than one reason would remove counts for the first of them. One that is still being generated, or
waits for its turn, is *under way*: started = failed + stale + filtered + surplus + trained + under way, at every step.
Everything that removes responses by length changes which lengths the update sees, exactly as an uneven clip does; so
a report gives each stage an acceptance rate by length and its Length Reweighting Error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.fairness.lre import Array, LengthReweightingError, length_reweighting_error, merge_bins
from fspo.length_bins import FINE_BINS, length_bin
from fspo.reading import COUNT, Kind, check_fields, list_of, object_of

STAGES: Final = ("failed", "stale", "filtered", "surplus", "trained")
_SUMMED: Final = ("staleness", "versions")
_K: Final = FINE_BINS
Bins = npt.NDArray[np.int64]
_UNKNOWN: Final = Kind("-1", lambda value: value == -1)
_ROW: Final = Kind(
    f"a fine bin (-1: not known), then {len(STAGES) + len(_SUMMED)} counts",
    lambda row: (
        isinstance(row, list)
        and len(row) == 1 + len(STAGES) + len(_SUMMED)
        and (COUNT | _UNKNOWN).holds(row[0])
        and row[0] < _K
        and all(map(COUNT.holds, row[1:]))
    ),
)
_RECORD: Final = {"rows": list_of(_ROW), "tokens": object_of(dict.fromkeys(STAGES, COUNT), needed=STAGES)}


def _bins(lengths: Sequence[int]) -> list[int]:
    """Fine length bin of each response; the one after the last where the length is not known."""
    known = length_bin([max(1, length) for length in lengths]).tolist()
    return [k if length > 0 else _K for k, length in zip(known, lengths, strict=True)]


class LengthFunnel:
    """Counts ends of responses, step by step."""

    def __init__(self) -> None:
        self._under_way = 0
        #: Step at which a prompt was first issued, by its identifier, where a resumed run has issued it again.
        self.first_issue: dict[str, int] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._started = 0
        #: By fine length bin (the last column: not known), responses by stage, then what is summed of the trained ones.
        self._columns = np.zeros((len(STAGES) + len(_SUMMED), _K + 1), dtype=np.int64)
        self._tokens = dict.fromkeys(STAGES, 0)

    def start(self, responses: int) -> None:
        """Count responses whose prompts were issued."""
        self._started += responses
        self._under_way += responses

    def end(self, stage: str, lengths: Sequence[int], unknown: int = 0) -> None:
        """Count responses that ended.

        Args:
            stage: One of STAGES.
            lengths: Their lengths in tokens; 0 counts as not known.
            unknown: Further ones whose length is not known.
        """
        bins = [*_bins(lengths), *[_K] * unknown]
        np.add.at(self._columns[STAGES.index(stage)], bins, 1)
        self._tokens[stage] += sum(lengths)
        self._under_way -= len(bins)

    def train(self, lengths: Sequence[int], staleness: Sequence[int], versions: Sequence[int]) -> None:
        """Count responses that were trained on.

        Args:
            lengths: In tokens.
            staleness: Steps from the issue of the prompt to the update; 0 in synchronous training.
            versions: Policy versions that generated the response, at least 1.
        """
        self.end("trained", lengths)
        for row, values in enumerate((staleness, versions), len(STAGES)):
            np.add.at(self._columns[row], _bins(lengths), values)

    def end_step(self, step: int) -> tuple[dict[str, float], dict[str, Any]]:
        """Close a step.

        Returns:
            Metrics by name (docs/fairness.md; undefined ones are absent), and the step as a record for
            ``funnel.jsonl``: ``{"step", "started", "under_way", "tokens", "rows"}`` with tokens by stage and, for each
            fine length bin that holds a response, [bin, number by stage ..., sum of staleness, sum of versions]; bin
            -1: not known.
        """
        count_S = self._columns[: len(STAGES)].sum(1)
        metrics = {f"fspo/funnel/{stage}": float(count) for stage, count in zip(STAGES, count_S, strict=True)}
        metrics["fspo/funnel/under_way"] = float(self._under_way)
        finished_S = self._columns[: len(STAGES), :_K].sum(1)
        lost, trained = int(finished_S[:-1].sum()), int(finished_S[-1])
        lost_tokens, trained_tokens = sum(self._tokens[stage] for stage in STAGES[:-1]), self._tokens["trained"]
        if lost or trained:
            metrics["fspo/funnel/tokens_lost"] = lost_tokens / (lost_tokens + trained_tokens)
        if lost:
            metrics["fspo/funnel/length_lost"] = lost_tokens / lost
        if trained:
            metrics["fspo/funnel/length_trained"] = trained_tokens / trained
            for name, total in zip(_SUMMED, self._columns[len(STAGES) :].sum(1), strict=True):
                metrics[f"fspo/funnel/{name}"] = float(total / trained)
        filled = np.flatnonzero(self._columns.any(0))
        record = {
            "step": step,
            "started": self._started,
            "under_way": self._under_way,
            "tokens": dict(self._tokens),
            "rows": [[int(k) if k < _K else -1, *self._columns[:, k].tolist()] for k in filled],
        }
        self._begin_step()
        return metrics, record

    def state_dict(self) -> dict[str, Any]:
        """The step in progress and what is under way, for a checkpoint."""
        return {
            "under_way": self._under_way,
            "started": self._started,
            "ended": self._columns.tolist(),
            "tokens": dict(self._tokens),
            "first_issue": dict(self.first_issue),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in place."""
        self._begin_step()
        self._under_way, self._started = int(state["under_way"]), int(state["started"])
        self._columns[:] = state["ended"]
        self._tokens = dict(state["tokens"])
        self.first_issue = dict(state["first_issue"])


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
        """From records of :meth:`LengthFunnel.end_step`.

        Raises:
            KeyError, TypeError, ValueError, IndexError: If a record is none.
        """
        columns_MCK = np.zeros((len(records), len(STAGES) + len(_SUMMED), _K + 1))
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
