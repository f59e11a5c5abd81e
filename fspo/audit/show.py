"""The printed side of an audit: what a clip does by length, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fspo.audit.read import AuditRecords
from fspo.clip_value import ACCEPT
from fspo.conclusion import accepted_at, conclude, in_view
from fspo.fairness.lre import Array
from fspo.losses import ALGORITHMS, BANDS
from fspo.markdown import markdown_table
from fspo.metrics import removed
from fspo.responses import Responses
from fspo.types import NO_CLIP, SequenceLossSettings, shape

NOT_MOVED: Final = (
    "no mini-batch in which a weight had moved before: the audit needs two optimizer steps per rollout batch; if the "
    "old log-probabilities are the rollout engine's, --every-mini-batch counts all"
)


def by_length(
    responses: Responses,
    accept: float = ACCEPT,
    view: str = "outside",
    bands: Sequence[SequenceLossSettings] = (),
    own_mask: bool = False,
) -> dict[str, list[str]]:
    """What clips do by length, the cells of each column: one for each of eight bins, and the LRE.

    The audited loss's own band, where it is known; those of FSPO, RLOO and GSPO at the clip values that accept one
    common share; and ``bands`` at their own. ``own_mask`` says that the rows are of a mask or a correction.
    """
    counted = in_view(responses, view)
    if view == "removed":
        responses = responses.with_advantage()
    length_J, mean_J = responses.means(responses.length_B, responses.s_B)
    (square_J,) = responses.means((responses.s_B - mean_J[responses.bin_B]) ** 2)
    table = {
        "mean length": [*(f"{x:.0f}" for x in length_J), "LRE"],
        "responses": [*(f"{x:.0f}" for x in responses.by_bin()), ""],
        "mean S": [*(f"{x:+.4f}" for x in mean_J), ""],
        "std of S": [*(f"{x:.4f}" for x in np.sqrt(square_J)), ""],
    }

    def add(head: str, accepted_B: Array, lre: bool = True) -> None:
        known_B = ~np.isnan(accepted_B)  # what is removed hangs on A, which may not be known of all
        with np.errstate(invalid="ignore"):  # nan where none is known
            share_J = responses.by_bin(np.where(known_B, 1 - accepted_B, 0.0)) / responses.by_bin(known_B)
        table[head] = [*(f"{x:.1%}" for x in share_J), responses.error(accepted_B).words if lre else ""]

    if responses.rule_known:
        add(view, responses.accepted_B(view))
        if len(responses.with_advantage()):  # those of a rollout correction are not known yet
            high_B, low_B = removed(responses)
            add("removed, A > 0", 1 - high_B, False)
            add("removed, A < 0", 1 - low_B, False)
        if own_mask:
            table["mean weight"] = [*(f"{x:.3g}" for x in responses.means(responses.weight_B)[0]), ""]
    if (counted.s_B == 0).mean() < accept:  # else every band accepts more
        for name, loss in BANDS.items():
            add(f"{name} {1 - accept:.0%}", accepted_at(counted, ALGORITHMS[loss], accept))
    for band in bands:
        low, high = ("inf" if c == NO_CLIP else f"{c:.4g}" for c in (band.c_low, band.c_high))
        add(f"{shape(band.exponent)}, -{low} to {high}", responses.judged_by(band).accepted_B(view))
    return table


def verdict(responses: Responses, view: str = "outside") -> str:
    """Whether the audited loss's own clip is even over lengths, in a sentence with its LRE."""
    responses = in_view(responses, view)
    if not len(responses):
        return f"no response has an advantage, so nothing could be {view}"
    if not responses.rule_known:
        return "of this loss no rule is known, so it has no LRE; python -m fspo.audit --band E,LOW,HIGH judges any"
    error = responses.error(view)
    if not error.is_informative:
        return f"nothing was {'clipped' if error.rate else 'accepted'}, so there is no LRE"
    lre = error.debiased
    even = "uneven" if lre.low > 0.0005 else "not shown to be uneven"
    if not np.isfinite(lre.low):
        even = f"not told, of {lre.n} {responses.unit}, whether it is even"
    (length_J,) = responses.means(responses.length_B)
    short, long = (
        f"{1 - error.rate_K[at]:.0%} of the {which} ({length_J[at]:.0f} tokens)"
        for at, which in ((0, "shortest"), (-1, "longest"))
    )
    return f"{even}: LRE {error.words}; {view} {1 - error.rate:.1%}, {short} and {long}"


def what_follows(records: AuditRecords, accept: float, view: str = "outside") -> list[str]:
    """:func:`fspo.conclusion.conclude` of all mini-batches in which the policy had moved; arguments of describe."""
    if records.wrong():
        return ["no conclusion and no clip value: old log-probabilities are not the policy's (see the note)"]
    return conclude(records.responses.moved(), records.loss, accept, records.settings, view, records.own_mask)


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
    share = records.accept if accept is None else accept
    if not len(moved):
        nothing_read = [] if len(records.responses) else records.problems
        return "\n".join([*notes, *(nothing_read or [NOT_MOVED])])
    if not len(in_view(moved, view)):
        return "\n".join([*notes, verdict(moved, view)])
    table = by_length(moved, share, view, bands, records.own_mask)
    name = f"loss {records.loss or 'not named'}"
    head = f"{name}: {moved.batches} mini-batches, {len(moved)} responses"
    columns = f"{', '.join(BANDS)}: share {view} with clip values that leave {1 - share:.0%} {view}"
    return "\n\n".join(
        [
            "\n".join([head, *notes]),
            markdown_table(list(table), list(zip(*table.values(), strict=True))),
            f"{columns}.\n{name}: {verdict(moved, view)}.",
            "\n".join(["What follows:", *(f"- {line}" for line in what_follows(records, share, view))]),
        ]
    )
