"""The tables of a report as plain rows of text, ready for HTML and for the summary file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fspo.fairness import Interval, LengthReweightingError
from fspo.records import PlannedRun
from fspo.report.common_records import CommonRecord
from fspo.report.groups import Measure, RunGroup, group_interval, paired_interval, paired_runs
from fspo.report.runs import Run

NOT_RUN: Final = "not run"


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
        cells = [show_interval(group_interval(group, measure), measure.form) for group in groups]
        if any(cells):
            rows.append((measure.label, measure.meaning, _why(cells, measure.lacking)))
    return Table(group_heads(groups), rows)


def paired_differences(groups: Sequence[RunGroup], measures: Sequence[Measure]) -> Table | None:
    """First group minus each other one over their paired runs; None where no two groups share a seed."""
    if len(groups) < 2:
        return None
    first, others = groups[0], list(groups[1:])
    paired = [paired_runs(first, other) for other in others]
    if not any(pairs or apart for pairs, apart in paired):
        return None
    missing = ["ended at different steps" if apart else "no seed in common" for _, apart in paired]
    shared = [len(pairs) for pairs, _ in paired]

    rows = []
    for measure in measures:
        form = measure.form if measure.form.startswith("{:+") else measure.form.replace("{:", "{:+", 1)
        cells = [show_interval(paired_interval(first, other, measure), form, bold=True) for other in others]
        if any(cells):
            rows.append(
                (
                    measure.label,
                    measure.meaning,
                    _why(cells, [measure.lacking if n else why for n, why in zip(shared, missing, strict=True)]),
                )
            )
    heads = [f"{first.algo} - {other.algo} ({n} paired)" for other, n in zip(others, shared, strict=True)]
    return Table(heads, rows)


def _why(cells: Sequence[str], reasons: str | Sequence[str]) -> list[str]:
    """The cells, with a reason in brackets in place of each empty one."""
    each = [reasons] * len(cells) if isinstance(reasons, str) else reasons
    return [cell or f"({reason})" for cell, reason in zip(cells, each, strict=True)]


def common_record_table(records: Sequence[CommonRecord], groups: Sequence[RunGroup]) -> Table | None:
    """Debiased LRE of each group's band (rows) on the records of each group (columns)."""
    sources = list(dict.fromkeys(record.records for record in records))
    found = {(r.band, r.matched, r.records): r for r in records}
    bands = {record.band for record in records}
    rows = []
    for matched in (False, True):
        for algo in dict.fromkeys(group.algo for group in groups):
            cells = [_record_cell(found[key]) if (key := (algo, matched, s)) in found else "" for s in sources]
            why = "this clip rate is out of its reach" if algo in bands else "no fixed band, or not on S"
            rows.append((f"{algo}, {'matched' if matched else 'own'} clips", "", _why(cells, why)))
    return Table([f"on {source}'s records" for source in sources], rows) if rows else None


def grid_table(planned: Mapping[Path, PlannedRun], runs: Sequence[Run]) -> Table:
    """Status of every planned run, and of given runs that are in no plan: rows are groups, columns seeds."""
    status: dict[tuple[str, str], dict[int | None, str]] = {}
    for plan in planned.values():
        status.setdefault((plan.comparison, plan.algo), {})[plan.seed] = NOT_RUN
    by_path = {folder.resolve(): plan for folder, plan in planned.items()}
    for run in runs:
        # A planned run whose run.json is unreadable still has its place in the grid.
        place = by_path.get(run.path.resolve(), run)
        text = f"{run.ending}, {max(run.steps)} steps" if run.steps else "no data"
        status.setdefault((place.comparison, place.algo), {})[place.seed] = text
    seeds = sorted({seed for row in status.values() for seed in row}, key=lambda s: (s is None, s or 0))
    rows = [
        (algo, comparison, [row.get(seed, "(not planned)") for seed in seeds])
        for (comparison, algo), row in status.items()
    ]
    return Table([f"seed {'?' if seed is None else seed}" for seed in seeds], rows)


def provenance_table(runs: Sequence[Run]) -> Table:
    """Where each run came from: the commit, the command and the versions."""
    rows = []
    for run in runs:
        versions = run.info.get("versions")
        shown = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""
        command = run.info.get("command", "")
        command = " ".join(map(str, command)) if isinstance(command, list) else str(command)
        commit = f"{run.info.get('commit') or ''}{' + changes' if run.info.get('dirty') else ''}"
        rows.append((f"{run.algo}, seed {run.seed}", run.comparison, _why([commit, command, shown], "not recorded")))
    return Table(["commit", "command", "versions"], rows)


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


def group_heads(groups: Sequence[RunGroup]) -> list[str]:
    """Column heads: each group's algorithm and number of runs."""
    return [f"{group.algo} (n = {len(group.runs)})" for group in groups]


def show_lre(error: LengthReweightingError, beside: str) -> str:
    """Debiased LRE with its interval, and ``beside`` after it."""
    if np.isnan(error.lre):
        return "undefined: nothing accepted"
    return f"{error.debiased.value:.3f} [{error.debiased.low:.3f}, {error.debiased.high:.3f}]{beside}"


def _record_cell(record: CommonRecord) -> str:
    return show_lre(record.error, f" at acceptance {record.error.rate:.2f}")
