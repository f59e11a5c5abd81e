"""The tables of docs/performance.md from the rows of finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.pages import markdown
from benchmarks.versus_verl.variants import VARIANTS

NOT_RUN = "`not run`"
Row = Mapping[str, Any]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and range; the value alone if there is one."""
    if not values:
        return NOT_RUN
    if len(values) == 1:
        return f"{values[0]:.{digits}f} (one run)"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def step_medians(rows: Sequence[Row]) -> list[float]:
    """Of each run the median of its later steps."""
    return [median(row["steps_s"]) for row in rows]


def _by_variant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {variant.name: [row for row in rows if row["variant"] == variant.name] for variant in VARIANTS}


def _times(values: Mapping[str, Sequence[float]], variant: str) -> str:
    """This variant's median as a multiple of the recipe's."""
    if not values[variant] or not values["recipe"]:
        return NOT_RUN
    return f"{median(values[variant]) / median(values['recipe']):.2f}"


def _table(columns: Mapping[str, Mapping[str, Sequence[float]]], compared: str, digits: int) -> str:
    rows = []
    for variant in VARIANTS:
        cells = [spread(values[variant.name], digits) for values in columns.values()]
        rows.append(
            [variant.title, str(len(columns[compared][variant.name])), *cells, _times(columns[compared], variant.name)]
        )
    return markdown(["", "runs", *columns, f"{compared.split(',')[0]}, times the recipe's"], rows)


def startup_table(rows: Sequence[Row]) -> str:
    """Start-up: command to the beginning and the end of the first step, and the processor seconds until then."""
    variants = _by_variant(rows)
    fields = {
        "first step begins, s": "first_step_begins_s",
        "first step ends, s": "first_step_ends_s",
        "CPU seconds until it begins": "cpu_until_first_step_s",
    }
    columns = {
        title: {variant: [row[field] for row in found] for variant, found in variants.items()}
        for title, field in fields.items()
    }
    return _table(columns, "first step begins, s", 1)


def step_table(rows: Sequence[Row]) -> str:
    """Step time: all of it, and verl's own timers of its parts."""
    variants = _by_variant(rows)
    columns: dict[str, dict[str, list[float]]] = {"step, s": {a: step_medians(found) for a, found in variants.items()}}
    for part in ("gen", "old_log_prob", "ref", "update_actor", "update_weights"):
        columns[part] = {
            a: [row["timings_s"][part] for row in found if part in row["timings_s"]] for a, found in variants.items()
        }
    return _table(columns, "step, s", 1)


def memory_table(rows: Sequence[Row]) -> str:
    """Peak of the sum over all processes."""
    variants = _by_variant(rows)
    columns = {"peak, MiB": {variant: [row["peak_pss_mib"] for row in found] for variant, found in variants.items()}}
    return _table(columns, "peak, MiB", 0)


def process_table(rows: Sequence[Row]) -> str:
    """Per kind of process: how many, when the first began, processor seconds until the first step, peak memory."""
    variants = {name: found for name, found in _by_variant(rows).items() if found}
    kinds: dict[str, dict[str, list[list[Row]]]] = {}
    for variant, found in variants.items():
        for row in found:
            by_kind: dict[str, list[Row]] = {}
            for process in row["processes"]:
                by_kind.setdefault(_same_kind(process["kind"]), []).append(process)
            for kind, processes in by_kind.items():
                kinds.setdefault(kind, {}).setdefault(variant, []).append(processes)
    titles = {variant.name: variant.title for variant in VARIANTS}
    lines = []
    for kind, of_variants in kinds.items():
        cells, weight = [], 0.0
        for variant in variants:
            runs = of_variants.get(variant, [])
            if not runs:
                cells.append("")
                continue
            cpu = median(sum(p["cpu_s"] for p in run) for run in runs)
            peak = median(sum(p["peak_pss_mib"] for p in run) for run in runs)
            began = median(min(p["began_s"] for p in run) for run in runs)
            count = round(median(len(run) for run in runs))
            cells.append(f"{count}: {began:.0f} s, {cpu:.1f} s, {peak:.0f} MiB")
            weight = max(weight, cpu, peak / 100)
        lines.append((weight, [kind, *cells]))
    lines.sort(key=lambda line: -line[0])
    return markdown(
        ["process", *(titles[variant] for variant in variants)], [cells for weight, cells in lines if weight >= 0.5]
    )


def _same_kind(kind: str) -> str:
    """One name for what has another in each variant."""
    return {"FSPOTaskRunner": "TaskRunner", "TaskRunnerV1": "TaskRunner"}.get(kind, kind)


def machine_line(rows: Sequence[Row]) -> str:
    """What the machine was, and how much of it others used."""
    if not rows:
        return NOT_RUN
    cores = ", ".join(sorted({str(row["cores"]) for row in rows}))
    others = [100 * row["others_share"] for row in rows]
    sampler = median(row["sampler_cpu_s"] / row["cpu_s"] for row in rows)
    return (
        f"{len(rows)} runs of 5 steps on {cores} cores, {min(row['date'] for row in rows)} to "
        f"{max(row['date'] for row in rows)} UTC. Processes of others took {min(others):.0f} to {max(others):.0f}% of "
        f"the cores meanwhile (median {median(others):.0f}%), the sampler {100 * sampler:.1f}% of what a run used."
    )
