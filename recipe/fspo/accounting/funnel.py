"""The length funnel: where every response that was started ends, by length. Defined here.

A response ends in exactly one stage:

* ``failed``: no usable response came of it, or its group was given up because another response of it failed;
* ``stale``: finished, but its prompt was issued too many policy versions ago;
* ``filtered``: finished, but removed by group filtering (all rewards of its group are equal);
* ``surplus``: finished and usable, but more than the batch needed;
* ``trained``: used in an update.

A response that more than one reason would remove counts for the first of them. One that is still being generated, or
waits for its turn, is *under way*: started = failed + stale + filtered + surplus + trained + under way, at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fspo.length_bins import FINE_BINS, length_bin

#: Where a response ends: the stages in the order in which it passes them.
STAGES: Final = ("failed", "stale", "filtered", "surplus", "trained")
#: What is summed over the responses that were trained on.
SUMMED: Final = ("staleness", "versions")
_K: Final = FINE_BINS


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
        self._columns = np.zeros((len(STAGES) + len(SUMMED), _K + 1), dtype=np.int64)
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
            Metrics by name (docs/metrics.md; undefined ones are absent), and the step as a record for
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
            for name, total in zip(SUMMED, self._columns[len(STAGES) :].sum(1), strict=True):
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
