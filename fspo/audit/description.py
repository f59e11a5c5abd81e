"""The printed side of an audit: tables by length with what follows from them; live numbers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fspo.audit.reading import AuditRecords
from fspo.clip import needed_scale, scale_for, scaled
from fspo.conclusion import Override, conclude
from fspo.diagnostics import removed
from fspo.fairness.lre import (
    Array,
    is_informative,
    lre_in_words,
    merge_bins,
    plain_lre,
)
from fspo.markdown import markdown_table
from fspo.responses import Responses
from fspo.types import SequenceLossSettings, shape, unit_of


def _spread(responses: Responses) -> tuple[Array, Array, Array, Array]:
    """Number, mean length, mean and standard deviation of S in each of eight bins of equal mass, [J] each."""
    starts = responses.starts()
    count_J = merge_bins(responses.count_K, starts)
    length_J, mean_J = (responses.by_bin(x_B, starts) / count_J for x_B in (responses.length_B, responses.s_B))
    square_J = responses.by_bin((responses.s_B - mean_J[responses.bin_B]) ** 2, starts) / count_J
    return count_J, length_J, mean_J, np.sqrt(square_J)


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
    _, length_J, _, spread_J = _spread(responses)
    metrics = {"length_short": length_J[0], "length_long": length_J[-1]}
    metrics |= {"S_std_short": spread_J[0], "S_std_long": spread_J[-1]}
    if responses.rule_known and responses.s_B.any():  # else nothing could be clipped
        metrics["accept_rate"], metrics["removed"] = responses.inside_B.mean(), 1 - responses.kept_B.mean()
        if is_informative(metrics["accept_rate"]):
            starts = responses.starts()
            accepted_J = responses.by_bin(responses.inside_B, starts)
            metrics["lre"] = plain_lre(accepted_J, merge_bins(responses.count_K, starts))[0]
    return {name: float(value) for name, value in metrics.items()}


#: Stands for no limit on one side of a band: clip values are finite.
NO_LIMIT: Final = 1e9
NOT_MOVED: Final = (
    "no mini-batch in which a weight had moved before: the audit needs two optimizer steps per rollout batch"
)


def what_follows(records: AuditRecords, accept: float | None = None, override: Override | None = None) -> list[str]:
    """:func:`fspo.conclusion.conclude` of all mini-batches in which the policy had moved; arguments of describe."""
    accept = records.accept if accept is None else accept
    override = None if records.own_mask else override  # S is not that of a loss
    return conclude(records.responses.moved(), records.loss, accept, records.wrong(), override, records.settings)


def _lre_of(responses: Responses) -> str:
    error = responses.error_by_cluster(responses.inside_B)
    lre = error.debiased
    return f"LRE {lre_in_words(lre.value, lre.low, lre.high)}" if error.is_informative else "no LRE"


def _of_bands(
    moved: Responses, bands: Sequence[SequenceLossSettings], accept: float
) -> tuple[dict[str, list[str]], list[str]]:
    """Share inside each band by length, a column each; and a line each: how much it keeps, and how evenly.

    At its own limits, and with both multiplied so that ``accept`` of the responses lie inside.
    """
    starts = moved.starts()
    count_J = merge_bins(moved.count_K, starts)
    table = {"mean length": [f"{x:.0f}" for x in moved.by_bin(moved.length_B, starts) / count_J]}
    lines = []
    for band in bands:
        low, high = ("inf" if c == NO_LIMIT else f"{c:.4g}" for c in (band.c_low, band.c_high))
        name = f"{shape(band.exponent)}, -{low} to {high}"
        inside = moved.judged_by(band)
        table[name] = [f"{x:.1%}" for x in inside.by_bin(inside.inside_B, starts) / count_J]
        line = f"{name} {unit_of(band.exponent)}: {inside.inside_B.mean():.1%} inside, {_lre_of(inside)}"
        if (scale := scale_for(needed_scale(moved.s_B, moved.length_B, band), accept)) > 0:
            line += f"; both times {scale:.3g}: {accept:.0%} inside, {_lre_of(moved.judged_by(scaled(band, scale)))}"
        lines.append(line)
    return table, lines


def describe(
    records: AuditRecords,
    accept: float | None = None,
    override: Override | None = None,
    bands: Sequence[SequenceLossSettings] = (),
) -> str:
    """Tables by length of all mini-batches in which the policy had moved, and what follows from them.

    Args:
        records: Of :func:`read_audit`.
        accept: Share of the responses for whose acceptance clip values are wanted; by default the run's.
        override: Of :func:`fspo.conclusion.conclude`.
        bands: Other bands or masks on S and L, each with what it keeps of these responses.
    """
    moved, notes = records.responses.moved(), [f"note: {note}" for note in records.notes()]
    name = records.loss or "not named"
    if len(moved) == 0:
        is_empty = not (len(records.responses) or records.left_out)
        return "\n".join([*notes, *(records.problems if is_empty and records.problems else [NOT_MOVED])])
    count_J, length_J, mean_J, spread_J = _spread(moved)
    columns = {
        "mean length": [f"{x:.0f}" for x in length_J],
        "sequences": [f"{x:.0f}" for x in count_J],
        "mean S": [f"{x:+.4f}" for x in mean_J],
        "std of S": [f"{x:.4f}" for x in spread_J],
        "std / sqrt(L)": [f"{x:.4f}" for x in spread_J / np.sqrt(length_J)],
    }
    lines = [f"loss {name}: {moved.batches} mini-batches, {len(moved)} sequences"]
    if moved.rule_known:
        starts, (high_B, low_B) = moved.starts(), removed(moved)
        shares = {"accepted": moved.inside_B}
        if moved.advantage_B.any():  # those of a rollout correction are not known yet
            shares |= {"removed, A > 0": high_B, "removed, A < 0": low_B}
        columns |= {
            head: [f"{x:.1%}" for x in moved.by_bin(values_B, starts) / count_J] for head, values_B in shares.items()
        }
        if records.own_mask:
            columns["mean weight"] = [f"{x:.3g}" for x in moved.by_bin(moved.weight_B, starts) / count_J]
        error = moved.error()
        lre = lre_in_words(error.debiased.value, error.debiased.low, error.debiased.high)
        lines.append(
            f"accepted {error.rate:.1%}; LRE {lre} (0: acceptance does not "
            f"depend on length{', which so few responses do not exclude' * ('<' in lre)}; noise floor "
            f"{error.noise_floor:.3f})"
            if error.is_informative
            else f"nothing was {'clipped' if error.rate else 'accepted'}, so there is no LRE"
        )
    tables = [columns]
    if bands:
        of_bands, more = _of_bands(moved, bands, records.accept if accept is None else accept)
        tables.append(of_bands)
        lines += more
    shown = [markdown_table(list(table), list(zip(*table.values(), strict=True))) for table in tables]
    end = "\n".join(["What follows:", *(f"- {line}" for line in what_follows(records, accept, override))])
    return "\n\n".join(["\n".join(lines + notes), *shown, end])
