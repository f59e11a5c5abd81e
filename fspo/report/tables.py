"""The tables of a report as plain rows of text, ready for HTML and for the summary file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fspo.fairness.lre import Interval, LengthReweightingError, lre_in_words
from fspo.records import PlannedRun
from fspo.report.groups import Measure, RunGroup, group_interval, paired_interval, paired_runs
from fspo.report.runs import Run

NOT_RUN: Final = "not run"
NOT_RECORDED: Final = "(not recorded)"
NOTHING: Final = "-"
"""Stands for a clip rate if nothing could be clipped, and for an LRE if nothing was clipped."""


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads, and rows: a head, its explanation (may be empty) and the cells.

    Bold cells start with ``*``; cells in brackets say why there is no value.
    """

    heads: list[str]
    rows: list[tuple[str, str, list[str]]]


def final_numbers(groups: Sequence[RunGroup], measures: Sequence[Measure]) -> Table:
    """Mean over the runs of each group with a bootstrap interval over seeds."""
    rows = []
    for measure in measures:
        cells = [
            show_interval(group_interval(group, measure), measure.form) or _absent(measure, group) for group in groups
        ]
        if any(cell != NOT_RECORDED for cell in cells):
            rows.append((measure.label, measure.meaning, cells))
    return Table(group_heads(groups), rows)


def paired_differences(groups: Sequence[RunGroup], measures: Sequence[Measure]) -> Table | None:
    """First group minus each other one over their paired runs; None where no two groups share a seed."""
    first, others = groups[0], groups[1:]
    paired = [paired_runs(first, other) for other in others]
    if not any(pairs or apart for pairs, apart in paired):
        return None
    missing = [
        NOT_RECORDED if pairs else "(ended at different steps)" if apart else "(no seed in common)"
        for pairs, apart in paired
    ]
    rows = []
    for measure in measures:
        form = measure.form.replace("{:+", "{:").replace("{:", "{:+")
        cells = [show_interval(paired_interval(first, other, measure), form, bold=True) for other in others]
        if any(cells):
            reasons = zip(cells, missing, [_absent(measure, first, other) for other in others], strict=True)
            shown = [cell or (absent if why == NOT_RECORDED else why) for cell, why, absent in reasons]
            rows.append((measure.label, measure.meaning, shown))
    counts = [len(pairs) for pairs, _ in paired]
    return Table([f"{first.algo} - {o.algo} ({n} paired)" for o, n in zip(others, counts, strict=True)], rows)


def _absent(measure: Measure, *groups: RunGroup) -> str:
    """The entry in place of a missing number: no value, or not recorded by any run of a group."""
    recorded = [any(measure.of(run) is not None for run in group.runs) for group in groups]
    return NOTHING if all(recorded) else NOT_RECORDED


def grid_table(planned: Mapping[Path, PlannedRun], runs: Sequence[Run]) -> Table:
    """Status of every planned run, and of given runs that are in no plan: rows are groups, columns seeds."""
    status: dict[tuple[str, str], dict[int | None, str]] = {}
    for plan in planned.values():
        status.setdefault((plan.clip_values, plan.algo), {})[plan.seed] = NOT_RUN
    for run in runs:
        text = f"{run.status}, {max(run.steps)} steps" if run.steps else "no data"
        if not run.steps and (count := run.responses.batches):  # an audit, or recorded responses
            text = f"{count} mini-batches"
        status.setdefault((run.clip_values, run.algo), {})[run.seed] = text
    seeds = sorted({seed for row in status.values() for seed in row}, key=lambda s: (s is None, s or 0))
    rows = [
        (algo, origin, [row.get(seed, "(not planned)") for seed in seeds]) for (origin, algo), row in status.items()
    ]
    return Table(["no seed recorded" if seed is None else f"seed {seed}" for seed in seeds], rows)


def show_interval(interval: Interval | None, form: str, bold: bool = False) -> str:
    """``value [low, high]``; the value alone for one or two seeds; empty for None. ``bold`` marks intervals without 0.

    The interval of two seeds is 12.7 standard errors wide to either side and tells a reader nothing, so it is left out.
    """
    if interval is None:
        return ""
    value = form.format(interval.value)
    if math.isnan(interval.low) or interval.n == 2:
        return value
    text = f"{value} [{form.format(interval.low)}, {form.format(interval.high)}]"
    return f"*{text}" if bold and interval.excludes_zero else text


def lre_interval(error: LengthReweightingError) -> str:
    """As :func:`show_lre`, with its value and both ends even where the interval reaches 0, for tables that compare."""
    return show_interval(error.debiased, "{:.3f}") if error.is_informative else show_lre(error)


def show_lre(error: LengthReweightingError) -> str:
    """Debiased LRE by :func:`fspo.fairness.lre.lre_in_words`; :data:`NOTHING` where no sequence was clipped."""
    if error.is_informative:
        return lre_in_words(error.debiased.value, error.debiased.low, error.debiased.high)
    return NOTHING if error.rate > 0 else "undefined: nothing accepted"


def group_heads(groups: Sequence[RunGroup]) -> list[str]:
    """Column heads: each group's algorithm and number of runs."""
    return [f"{group.algo} (n = {len(group.runs)})" for group in groups]
