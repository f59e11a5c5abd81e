"""The tables of a report as plain rows of text, ready for HTML and for the summary file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fspo.fairness import Interval, LengthReweightingError
from fspo.report.common import CommonRecord
from fspo.report.groups import Measure, RunGroup, group_interval, paired_interval, paired_lre_interval
from fspo.report.runs import PlannedRun, Run

NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads; rows of a head, an explanation of it (may be empty) and cells. Bold cells start with ``*``."""

    heads: list[str]
    rows: list[tuple[str, str, list[str]]]


def final_numbers(groups: Sequence[RunGroup], measures: Sequence[Measure]) -> Table:
    """Mean over the runs of each group with a bootstrap interval over seeds."""
    rows = []
    for measure in measures:
        cells = [show_interval(group_interval(group, measure), measure.form) for group in groups]
        if any(cells):
            rows.append((measure.label, measure.meaning, cells))
    return Table(group_heads(groups), rows)


def paired_differences(
    groups: Sequence[RunGroup], measures: Sequence[Measure], starts: npt.NDArray[np.int64]
) -> Table | None:
    """First group minus each other one over the seeds both have; None where no two groups share a seed."""
    if len(groups) < 2:
        return None
    first, others = groups[0], list(groups[1:])
    shared = [len(first.by_seed().keys() & other.by_seed().keys()) for other in others]
    if not any(shared):
        return None
    rows = []
    for measure in measures:
        form = measure.form if measure.form.startswith("{:+") else measure.form.replace("{:", "{:+", 1)
        cells = [show_interval(paired_interval(first, other, measure), form, bold=True) for other in others]
        if any(cells):
            rows.append((measure.label, measure.meaning, cells))
    for view in ("symmetric", "active", "mass"):
        cells = [
            show_interval(paired_lre_interval(first, other, view, starts), "{:+.3f}", bold=True) for other in others
        ]
        if any(cells):
            rows.append((f"LRE, {view}, plug-in", "seeds and mini-batches resampled", cells))
    heads = [f"{first.algo} - {other.algo} ({n} paired)" for other, n in zip(others, shared, strict=True)]
    return Table(heads, rows)


def common_record_table(records: Sequence[CommonRecord]) -> Table | None:
    """Debiased LRE of each band (rows) on the records of each group (columns)."""
    sources = list(dict.fromkeys(record.records for record in records))
    rows = []
    for matched in (False, True):
        for band in dict.fromkeys(record.band for record in records):
            found = {r.records: r for r in records if r.band == band and r.matched == matched}
            if not found:
                continue
            cells = [_record_cell(found[s]) if s in found else "" for s in sources]
            rows.append((f"{band}, {'matched' if matched else 'own'} clips", "", cells))
    return Table([f"on {source}'s records" for source in sources], rows) if rows else None


def grid_table(planned: Sequence[PlannedRun], runs: Sequence[Run]) -> Table:
    """Status of every planned run, and of given runs that no grid planned: rows are groups, columns seeds."""
    status: dict[tuple[str, str], dict[int | None, str]] = {}
    for plan in planned:
        status.setdefault((plan.comparison, plan.algo), {})[plan.seed] = NOT_RUN
    seen = {plan.path.resolve(): plan for plan in planned}
    for run in runs:
        cell = seen.get(run.path.resolve())
        # A planned run whose run.json is unreadable still has its place in the grid.
        key = (cell.comparison, cell.algo) if cell else (run.comparison, run.algo)
        text = f"{run.status}, {max(run.steps)} steps" if run.steps else "no data"
        status.setdefault(key, {})[cell.seed if cell else run.seed] = text
    seeds = sorted({seed for row in status.values() for seed in row}, key=lambda s: (s is None, s or 0))
    rows = [
        (f"{algo}", comparison, [row.get(seed, "") for seed in seeds]) for (comparison, algo), row in status.items()
    ]
    return Table([f"seed {'?' if seed is None else seed}" for seed in seeds], rows)


def show_interval(interval: Interval | None, form: str, bold: bool = False) -> str:
    """``value [low, high]``; the value alone for one or two seeds; empty for None. ``bold`` marks intervals without 0.

    Two seeds do have an interval, but at 12.7 standard errors it tells a reader nothing.
    """
    if interval is None:
        return ""
    value = form.format(interval.value)
    if math.isnan(interval.low) or interval.n == 2:
        return value
    text = f"{value} [{form.format(interval.low)}, {form.format(interval.high)}]"
    return f"*{text}" if bold and interval.excludes_zero else text


def group_heads(groups: Sequence[RunGroup]) -> list[str]:
    """Column heads: each group's algorithm and number of runs."""
    return [f"{group.algo} (n = {len(group.runs)})" for group in groups]


def show_lre(error: LengthReweightingError, beside: str) -> str:
    """Debiased LRE with its interval, and ``beside`` after it."""
    if np.isnan(error.lre):
        return "undefined: nothing accepted"
    return f"{error.lre_debiased:.3f} [{error.ci_low:.3f}, {error.ci_high:.3f}]{beside}"


def _record_cell(record: CommonRecord) -> str:
    return show_lre(record.error, f" at acceptance {record.error.rate:.2f}")
