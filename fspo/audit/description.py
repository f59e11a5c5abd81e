"""The printed side of an audit: tables by length and position with what follows from them; live numbers of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from fspo.acceptance import acceptance_counts, stack_sums
from fspo.audit.reading import AuditRecords
from fspo.conclusion import ACCEPT, Override, Responses, conclude
from fspo.fairness.lre import Array, equal_mass_starts, is_informative, lre_in_words, merge_bins, plain_lre
from fspo.markdown import markdown_table
from fspo.sums import SequenceSums

_BINS: Final = 8
#: Columns of the sums that :class:`LengthBins` merges.
_COLUMNS: Final = ("count", "accepted", "clipped_high", "clipped_low", "length", "S", "S_squared")


@dataclass(frozen=True)
class LengthBins:
    """Eight length bins of equal mass: the columns of the sums by bin, [J] each, and what follows from them."""

    starts: npt.NDArray[np.int64]
    columns: dict[str, Array]

    @classmethod
    def of(cls, sums: SequenceSums) -> LengthBins:
        """From sums by fine length bin."""
        starts = equal_mass_starts(sums.column("count").numpy(), _BINS)
        return cls(starts, {name: merge_bins(sums.column(name).numpy(), starts) for name in _COLUMNS})

    def mean(self, name: str) -> Array:
        """Mean of a column over the sequences of each bin, [J]."""
        return np.asarray(self.columns[name] / self.columns["count"])

    def spread(self) -> Array:
        """Standard deviation of S in each bin, [J]."""
        return np.asarray(np.sqrt(np.maximum(self.mean("S_squared") - self.mean("S") ** 2, 0.0)))


def live_metrics(sums: SequenceSums, acceptance: bool = True) -> dict[str, float]:
    """A handful of numbers of one step, from its sums by fine length bin. Defined here.

    Args:
        sums: Of all its mini-batches.
        acceptance: Whether the rule of acceptance is known.

    Returns:
        ``accept_rate``, ``removed`` (share of sequences whose gradient the clip removes), both absent if every S is 0,
        and ``lre`` (over eight bins of equal mass; absent if none was accepted or none clipped); mean length and
        standard deviation of S in the shortest and in the longest of these bins. Empty before any weight has moved.
    """
    count = sums.total("count")
    if count == 0:
        return {}
    bins = LengthBins.of(sums)
    length_J, spread_J = bins.mean("length"), bins.spread()
    metrics = {"length_short": length_J[0], "length_long": length_J[-1]}
    metrics |= {"S_std_short": spread_J[0], "S_std_long": spread_J[-1]}
    if acceptance and sums.total("S_squared") > 0:  # else nothing could be clipped
        metrics["accept_rate"] = sums.total("accepted") / count
        metrics["removed"] = (sums.total("clipped_high") + sums.total("clipped_low")) / count
        if is_informative(metrics["accept_rate"]):
            metrics["lre"] = plain_lre(bins.columns["accepted"], bins.columns["count"])[0]
    return {name: float(value) for name, value in metrics.items()}


def _position_columns(sums_PF: Array) -> dict[str, list[str]]:
    """Of S_t, the sum over the first t tokens, of all responses that reach t = 1, 2, 4, ...."""
    octave_P = np.flatnonzero(sums_PF[:, 0] > 1)
    n, s, squares, tokens, _, token_squares = sums_PF[octave_P].T
    t_P, spread_P = 2**octave_P, np.sqrt(np.maximum(squares / n - (s / n) ** 2, 0.0))
    columns = {"t": [str(t) for t in t_P], "reach t": [f"{x:.0f}" for x in n]}
    named = {"std of S_t": spread_P, "std / sqrt(t)": spread_P / np.sqrt(t_P)}
    named["rms of one token, t to 2t - 1"] = np.sqrt(token_squares / tokens)
    return columns | {head: [f"{x:.4f}" for x in values] for head, values in named.items()}


NOT_MOVED: Final = (
    "no mini-batch in which a weight had moved before: the audit needs two optimizer steps per rollout batch"
)


def what_follows(
    records: AuditRecords,
    accept: float = ACCEPT,
    responses: Responses | None = None,
    override: Override | None = None,
) -> list[str]:
    """:func:`fspo.conclusion.conclude` of all mini-batches in which the policy had moved; arguments of describe."""
    responses = Responses.of_sums(records.moved()) if responses is None else responses
    return conclude(responses, records.loss, accept, records.wrong(), override)


def describe(
    records: AuditRecords,
    accept: float = ACCEPT,
    responses: Responses | None = None,
    override: Override | None = None,
) -> str:
    """Tables by length and by position of all mini-batches in which the policy had moved, and what follows from them.

    Args:
        records: Of :func:`read_audit` or :func:`read_responses`.
        accept: Share of the responses for whose acceptance clip values are wanted.
        responses: Those behind the records, where they are known one by one.
        override: Of :func:`fspo.conclusion.conclude`.
    """
    parts, notes = records.moved(), [f"note: {note}" for note in records.notes()]
    if not parts:
        return "\n".join([*notes, NOT_MOVED])
    if not sum(part.total("count") for part in parts):
        return "\n".join(
            [*notes, f"loss {records.loss or 'not named'}: no response with a token in {len(parts)} mini-batches"]
        )
    bins = LengthBins.of(sum(parts, SequenceSums.zeros()))
    length_J, spread_J = bins.mean("length"), bins.spread()
    columns = {
        "mean length": [f"{x:.0f}" for x in length_J],
        "sequences": [f"{x:.0f}" for x in bins.columns["count"]],
        "mean S": [f"{x:+.4f}" for x in bins.mean("S")],
        "std of S": [f"{x:.4f}" for x in spread_J],
        "std / sqrt(L)": [f"{x:.4f}" for x in spread_J / np.sqrt(length_J)],
    }
    name, sequences = records.loss or "not named", bins.columns["count"].sum()
    lines = [f"loss {name}: {len(parts)} mini-batches, {sequences:.0f} sequences"]
    if records.acceptance:
        shares = {"accepted": "accepted", "removed, A > 0": "clipped_high", "removed, A < 0": "clipped_low"}
        columns |= {head: [f"{x:.1%}" for x in bins.mean(column)] for head, column in shares.items()}
        error = acceptance_counts(stack_sums(parts)).error(bins.starts)
        lre = lre_in_words(error.debiased.value, error.debiased.low, error.debiased.high)
        lines.append(
            f"accepted {error.rate:.1%}; LRE {lre} (0: acceptance does not "
            f"depend on length{', which so few responses do not exclude' * ('<' in lre)}; noise floor "
            f"{error.noise_floor:.3f})"
            if error.is_informative
            else f"nothing was {'clipped' if error.rate else 'accepted'}, so there is no LRE"
        )
    positions = [x for key, x in records.positions.items() if key[1] > 0]
    second = [_position_columns(torch.stack(positions).sum(0).numpy())] if positions else []
    columns_of_tables = [columns, *second]
    tables = [markdown_table(list(table), list(zip(*table.values(), strict=True))) for table in columns_of_tables]
    end = "\n".join(["What follows:", *(f"- {line}" for line in what_follows(records, accept, responses, override))])
    return "\n\n".join(["\n".join(lines + notes), *tables, end])
