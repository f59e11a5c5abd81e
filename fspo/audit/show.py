"""The printed side of an audit: what a clip does by length, and what follows from it; live numbers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fspo.audit.read import AuditRecords
from fspo.clip_value import ACCEPT
from fspo.conclusion import accepted_at, conclude, in_view
from fspo.fairness.lre import Array, is_informative, plain_lre
from fspo.losses import ALGORITHMS, BANDS
from fspo.markdown import markdown_table
from fspo.metrics import removed
from fspo.responses import Responses
from fspo.types import SequenceLossSettings, shape

#: Stands for no limit on one side of a band: clip values are finite.
NO_LIMIT: Final = 1e9
NOT_MOVED: Final = (
    "no mini-batch in which a weight had moved before: the audit needs two optimizer steps per rollout batch; if the "
    "old log-probabilities are the rollout engine's, --every-mini-batch counts all"
)

Cells = dict[str, list[str]]
"""A table: cells by head of the column."""


def live_metrics(responses: Responses) -> dict[str, float]:
    """A handful of numbers of the responses of one step, of mini-batches before which a weight had moved. Defined here.

    Returns:
        ``accept_rate``, ``removed`` (share of the gradient that the clip removes), both absent if every S is 0 or the
        rule of acceptance is not known, and ``lre`` (over eight bins of equal mass; absent if none was accepted or none
        clipped); mean length and standard deviation of S in the shortest and in the longest of these bins. Empty before
        any weight has moved.
    """
    if len(responses) == 0:
        return {}
    length_J, spread_J = responses.means(responses.length_B)[0], _spread(responses)
    metrics = {"length_short": length_J[0], "length_long": length_J[-1]}
    metrics |= {"S_std_short": spread_J[0], "S_std_long": spread_J[-1]}
    if responses.rule_known and responses.s_B.any():  # else nothing could be clipped
        metrics["accept_rate"], metrics["removed"] = responses.inside_B.mean(), 1 - responses.kept_B.mean()
        if is_informative(metrics["accept_rate"]):
            metrics["lre"] = plain_lre(responses.by_bin(responses.inside_B), responses.by_bin())
    return {name: float(value) for name, value in metrics.items()}


def _spread(responses: Responses) -> Array:
    """Standard deviation of S in each bin, [J]."""
    (mean_J,) = responses.means(responses.s_B)
    return np.sqrt(responses.means((responses.s_B - mean_J[responses.bin_B]) ** 2)[0])


def by_length(
    responses: Responses,
    accept: float = ACCEPT,
    view: str = "outside",
    bands: Sequence[SequenceLossSettings] = (),
    own_mask: bool = False,
) -> Cells:
    """What clips do by length: a row for each of eight bins, and one with the LRE of each column.

    The audited loss's own band, where it is known; those of FSPO, RLOO and GSPO at the clip values that accept one
    common share; and ``bands`` at their own.

    Args:
        responses: Of mini-batches before which a weight had moved, at least one.
        accept: The common share.
        view: What a column counts against a response; of ``removed`` the rows are the responses with A other than 0.
        bands: Other bands or masks on S and L.
        own_mask: Whether the rows are of a mask or a correction.
    """
    responses = in_view(responses, view)
    length_J, mean_J = responses.means(responses.length_B, responses.s_B)
    table: Cells = {
        "mean length": [*(f"{x:.0f}" for x in length_J), "LRE"],
        "responses": [*(f"{x:.0f}" for x in responses.by_bin()), ""],
        "mean S": [*(f"{x:+.4f}" for x in mean_J), ""],
        "std of S": [*(f"{x:.4f}" for x in _spread(responses)), ""],
    }

    def add(head: str, accepted_B: Array | None, lre: bool = True) -> None:
        if accepted_B is not None:
            (share_J,) = responses.means(1 - accepted_B)
            table[head] = [*(f"{x:.1%}" for x in share_J), responses.error(accepted_B).words if lre else ""]

    if responses.rule_known:
        add("outside" if view == "outside" else "removed", responses.accepted_B(view))
        if responses.advantage_B.any():  # those of a rollout correction are not known yet
            high_B, low_B = removed(responses)
            add("removed, A > 0", 1 - high_B, False)
            add("removed, A < 0", 1 - low_B, False)
        if own_mask:
            table["mean weight"] = [*(f"{x:.3g}" for x in responses.means(responses.weight_B)[0]), ""]
    for name, loss in BANDS.items():
        add(f"{name} {1 - accept:.0%}", accepted_at(responses, ALGORITHMS[loss], accept, view))
    for band in bands:
        low, high = ("inf" if c == NO_LIMIT else f"{c:.4g}" for c in (band.c_low, band.c_high))
        add(f"{shape(band.exponent)}, -{low} to {high}", responses.judged_by(band).accepted_B(view))
    return table


def verdict(responses: Responses, view: str = "outside") -> str:
    """Whether the audited loss's own clip is even over lengths, in a sentence with its LRE."""
    responses = in_view(responses, view)
    if not responses.rule_known:
        return "of this loss no rule is known, so it has no LRE"
    error = responses.error(view)
    if not error.is_informative:
        return f"nothing was {'clipped' if error.rate else 'accepted'}, so there is no LRE"
    lre = error.debiased
    even = "uneven" if lre.low > 0.0005 else "not shown to be uneven"
    if not np.isfinite(lre.low):
        even = f"not told, of {lre.n} {responses.unit}, whether it is even"
    ends = [f"{share:.0%} of the {which} ({length:.0f} tokens)" for share, length, which in zip(
        1 - error.rate_K[[0, -1]], responses.means(responses.length_B)[0][[0, -1]], ("shortest", "longest"), strict=True
    )]  # fmt: skip
    return f"{even}: LRE {error.words}; {view} {1 - error.rate:.1%}, {' and '.join(ends)}"


def what_follows(records: AuditRecords, accept: float | None = None, view: str = "outside") -> list[str]:
    """:func:`fspo.conclusion.conclude` of all mini-batches in which the policy had moved; arguments of describe."""
    accept, moved = records.accept if accept is None else accept, records.responses.moved()
    return conclude(moved, records.loss, accept, records.wrong(), records.settings, view, records.own_mask)


def describe(
    records: AuditRecords,
    accept: float | None = None,
    bands: Sequence[SequenceLossSettings] = (),
    view: str = "outside",
) -> str:
    """What the clip does by length in all mini-batches in which the policy had moved, and what follows.

    Args:
        records: Of :func:`read_audit`.
        accept: The common share of the bands that are compared; by default the run's.
        bands: Other bands or masks on S and L, each with what it keeps of these responses.
        view: A key of :data:`fspo.responses.VIEWS`.
    """
    moved, notes = records.responses.moved(), [f"note: {note}" for note in records.notes()]
    if len(moved) == 0:
        is_empty = not (len(records.responses) or records.left_out)
        return "\n".join([*notes, *(records.problems if is_empty and records.problems else [NOT_MOVED])])
    if len(in_view(moved, view)) == 0:
        return "\n".join([*notes, f"no response has an advantage, so nothing could be {view}"])
    share = records.accept if accept is None else accept
    table = by_length(moved, share, view, bands, records.own_mask)
    name = f"loss {records.loss or 'not named'}"
    head = f"{name}: {moved.batches} mini-batches, {len(moved)} responses"
    columns = f"{', '.join(BANDS)}: share {view} with clip values that leave {1 - share:.0%} {view}"
    return "\n\n".join(
        [
            "\n".join([head, *notes]),
            markdown_table(list(table), list(zip(*table.values(), strict=True))),
            f"{columns}.\n{name}: {verdict(moved, view)}.",
            "\n".join(["What follows:", *(f"- {line}" for line in what_follows(records, accept, view))]),
        ]
    )
