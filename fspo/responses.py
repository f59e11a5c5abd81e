"""Recorded responses in memory: one row for each response and mini-batch, and their sums by length. Defined here.

Everything that is computed of recorded responses starts from :class:`Responses`: a run's metrics, an audit, a report,
clip values and measured bands. The columns are those of :mod:`fspo.table`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from fspo.fairness.lre import Array, LengthReweightingError, bins_of, length_reweighting_error

if TYPE_CHECKING:
    from fspo.types import SequenceLossOutput, SequenceLossSettings

VIEWS: Final[dict[str, str]] = {
    "outside": "S inside the band, whatever the sign of the advantage",
    "removed": "gradient not removed by the clip (not: S above and A > 0, nor S below and A < 0)",
}
"""What a view counts against a response, and what acceptance is then. No claim about fairness should rest on one."""

EVERY_MINI_BATCH: Final = "every_mini_batch"
"""Entry of a table's metadata, ``yes`` or ``no``: whether mini-batches before which no weight had moved count, because
pi_old is the rollout engine's policy."""

#: So many clusters are resampled at most, for the time that it takes: of more, neighbours are one cluster.
_MOST_CLUSTERS: Final = 2000


@dataclass(frozen=True, eq=False)
class Responses:
    """Rows, float64 [B] each unless it says otherwise; nan where a value is not known.

    Attributes:
        s_B: S, the sequence log-ratio, nats.
        length_B: L, tokens.
        advantage_B: A.
        inside_B: Share inside the band whatever the sign of A; for a loss without a band what it keeps of a response
            at A = 1 or at A = -1, the smaller.
        kept_B: Share of the gradient kept at the row's own A.
        weight_B: The importance weight of the loss without its clip.
        truncated_B: 1 where the response was cut at the maximum length.
        step_B: Step of each, int64.
        update_B: Index of the mini-batch within its rollout batch, int64.
        batch_B: Mini-batch, numbered from 0 over all steps, int64; the responses of a mini-batch share one policy.
        moved_B: Whether a weight had moved before its mini-batch, bool.
        again_B: Whether an update was made on the same response before, in an earlier epoch, bool; known by ``row``.
        prompt_B: Prompt group, numbered from 0, int64; None where a row has none.
    """

    s_B: Array
    length_B: Array
    advantage_B: Array
    inside_B: Array
    kept_B: Array
    weight_B: Array
    truncated_B: Array
    step_B: npt.NDArray[np.int64]
    update_B: npt.NDArray[np.int64]
    batch_B: npt.NDArray[np.int64]
    moved_B: npt.NDArray[np.bool_]
    again_B: npt.NDArray[np.bool_]
    prompt_B: npt.NDArray[np.int64] | None = None

    @classmethod
    def of_rows(cls, rows: Mapping[str, Any], every_mini_batch: bool = False) -> Responses:
        """From columns by name, of which S and L are needed if there is any row; rows without S are left out.

        A column is [B], or one value for all. ``step``, ``minibatch`` (0: no weight had moved) and ``seed`` are 1 where
        they are missing. A mini-batch is one value of seed, step and ``update``, or of ``minibatch`` where there is no
        ``update``. ``prompt`` is there where it is known of every row. With ``every_mini_batch`` those of ``minibatch``
        0 count as moved, too: pi_old is another policy than that of the step's beginning.
        """
        S_B = np.asarray(rows.get("S", ()), dtype=np.float64)
        known_B = np.isfinite(S_B)

        def column(name: str, default: float = float("nan")) -> Array:
            values = np.broadcast_to(np.asarray(rows.get(name, default), dtype=np.float64), S_B.shape)
            return values if known_B.all() else values[known_B]

        number_B, update_B, row_B = column("minibatch", 1), column("update", -1), column("row", -1)
        update_B = number_B if update_B.min(initial=0) < 0 else update_B
        place = [column("seed", 1), column("step", 1)]
        again_B = row_B >= 0
        if again_B.any():
            response_B, first_B = _numbered(*place, np.where(again_B, row_B, -1)), np.full(len(row_B), np.inf)
            np.minimum.at(first_B, response_B, update_B)
            again_B &= update_B > first_B[response_B]
        prompt_B = None
        if "prompt" in rows:
            prompt_B = np.unique(np.asarray(rows["prompt"])[known_B], return_inverse=True)[1].reshape(-1)
        return cls(
            s_B=column("S"),
            length_B=column("L"),
            advantage_B=column("A"),
            inside_B=column("inside"),
            kept_B=column("kept"),
            weight_B=column("weight"),
            truncated_B=column("truncated"),
            step_B=place[1].astype(np.int64),
            update_B=np.maximum(update_B, 0).astype(np.int64),
            batch_B=_numbered(*place, update_B),
            moved_B=(number_B > 0) | every_mini_batch,
            again_B=again_B,
            prompt_B=prompt_B,
        )

    @classmethod
    def join(cls, parts: Sequence[Responses]) -> Responses:
        """Several sets, of which each keeps its own mini-batches and prompt groups."""
        if len(parts) < 2:
            return parts[0] if parts else cls.of_rows({})
        columns: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            values = [getattr(part, name) for part in parts]
            if any(value is None for value in values):
                continue
            if name in ("batch_B", "prompt_B"):
                firsts = np.cumsum([0, *(value.max(initial=-1) + 1 for value in values[:-1])])
                values = [value + first for value, first in zip(values, firsts, strict=True)]
            columns[name] = np.concatenate(values)
        return cls(**columns)

    def select(self, mask_B: npt.NDArray[np.bool_]) -> Responses:
        """The rows where the mask is true; their mini-batches and prompt groups are numbered from 0 again."""
        known = {name: values for name in self.__dataclass_fields__ if (values := getattr(self, name)) is not None}
        columns = {name: values[mask_B] for name, values in known.items()}
        columns |= {name: _numbered(columns[name]) for name in ("batch_B", "prompt_B") if name in columns}
        return Responses(**columns)

    def moved(self) -> Responses:
        """Those before whose mini-batch a weight had moved: before that S is 0, but for rounding."""
        return self if self.moved_B.all() else self.select(self.moved_B)

    def unmoved(self) -> Responses:
        """Those before whose mini-batch no weight had moved."""
        return self.select(~self.moved_B)

    def with_advantage(self) -> Responses:
        """Those whose A is known and not 0: of these a clip can remove the gradient."""
        return self.select(np.abs(self.advantage_B) > 0)

    def judged_by(self, settings: SequenceLossSettings) -> Responses:
        """The same responses under the band of another loss, one that is not measured."""
        import torch

        from fspo.losses import judged

        s_B, length_B, advantage_B = (torch.tensor(x) for x in (self.s_B, self.length_B, self.advantage_B))
        rows = rows_of(judged(s_B, length_B.long(), advantage_B, settings))
        return dataclasses.replace(self, inside_B=rows["inside"], kept_B=rows["kept"], weight_B=rows["weight"])

    def __len__(self) -> int:
        return len(self.s_B)

    @property
    def batches(self) -> int:
        """Number of mini-batches with a response."""
        return int(self.batch_B.max(initial=-1)) + 1

    @property
    def rule_known(self) -> bool:
        """Whether it is known of every response what the loss accepts."""
        return len(self) > 0 and not bool(np.isnan(self.inside_B).any())

    @cached_property
    def z_B(self) -> Array:
        """z = S / sqrt(L), nats per square root of a token."""
        return np.asarray(self.s_B / np.sqrt(self.length_B))

    def accepted_B(self, view: str = "outside") -> Array:
        """What is accepted of each in one of :data:`VIEWS`."""
        return {"outside": self.inside_B, "removed": self.kept_B}[view]

    @cached_property
    def bin_B(self) -> npt.NDArray[np.int64]:
        """Bin of each; eight bins of equal mass (:func:`fspo.fairness.lre.bins_of`)."""
        return bins_of(self.length_B)

    def by_bin(self, values_B: Array | None = None) -> Array:
        """Sums by bin, [J], of the values, or the number of responses."""
        return np.bincount(self.bin_B, values_B).astype(np.float64)

    def means(self, *values_B: Array) -> list[Array]:
        """Mean of each by bin, [J]."""
        return [self.by_bin(x_B) / self.by_bin() for x_B in values_B]

    @property
    def unit(self) -> str:
        """What is resampled, in words."""
        return "mini-batches" if self.prompt_B is None else "prompt groups"

    @cached_property
    def cluster_B(self) -> npt.NDArray[np.int64]:
        """What is resampled as a whole, numbered from 0: prompt groups, else mini-batches."""
        own_B = self.batch_B if self.prompt_B is None else self.prompt_B
        clusters = int(own_B.max(initial=-1)) + 1
        return own_B if clusters <= _MOST_CLUSTERS else own_B * _MOST_CLUSTERS // clusters

    def by_cluster(self, values_B: Array | None = None) -> Array:
        """Sums by cluster and bin, [C, J], of the values, or the number of responses."""
        clusters, bins = (int(index_B.max(initial=-1)) + 1 for index_B in (self.cluster_B, self.bin_B))
        sums = np.bincount(self.cluster_B * bins + self.bin_B, values_B, clusters * bins)
        return sums.reshape(clusters, bins).astype(np.float64)

    def error(self, accepted: str | Array = "outside") -> LengthReweightingError:
        """:func:`fspo.fairness.lre.length_reweighting_error` of at least one response, over clusters.

        Accepted is what the loss of these rows accepts in a view, or as given, [B].
        """
        accepted_B = self.accepted_B(accepted) if isinstance(accepted, str) else accepted.astype(np.float64)
        return length_reweighting_error(self.by_cluster(accepted_B), self.by_cluster())

    def could_clip(self) -> bool:
        """Whether there was anything to clip: some S is not 0, and some advantage."""
        return bool(self.s_B.any()) and not bool((self.advantage_B == 0).all())


def rows_of(output: SequenceLossOutput) -> dict[str, Array]:
    """What a loss made of a mini-batch as columns of the table (:data:`fspo.table.SCHEMA`), without padding."""
    columns = {"S": output.log_ratio_B, "L": output.length_B, "A": output.advantage_B, **output.judgement()}
    return {name: value[output.valid_B].detach().double().cpu().numpy() for name, value in columns.items()}


def _numbered(*keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The number, from 0, of each row's combination of keys, which are whole numbers, in their order."""
    numbers = np.zeros(len(keys[0]), dtype=np.int64)
    for key in keys:
        from_0 = key.astype(np.int64) - int(key.min(initial=0))
        numbers = numbers * (from_0.max(initial=0) + 1) + from_0
        if numbers.max(initial=0) < 4 * len(numbers):  # as a sort does it, but faster
            seen = np.zeros(numbers.max(initial=0) + 1, np.int64)
            seen[numbers] = 1
            numbers = (np.cumsum(seen) - 1)[numbers]
        else:
            numbers = np.unique(numbers, return_inverse=True)[1].reshape(-1)
    return numbers
