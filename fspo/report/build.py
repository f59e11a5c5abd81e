"""Puts a report together: reads run folders, draws the figures, fills the tables, writes the files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.acceptance import VIEWS
from fspo.files import atomic_path
from fspo.report.attributes import attribute_table
from fspo.report.common import MATCHED_CLIP_RATE, common_records, run_settings
from fspo.report.figures import comparison_figures
from fspo.report.groups import Measure, RunGroup, group_runs, standard_measures
from fspo.report.lengths import shared_starts
from fspo.report.page import Page, png_bytes
from fspo.report.runs import Run, expand_paths, load_run
from fspo.report.style import THEMES, themed
from fspo.report.tables import Table, common_record_table, final_numbers, grid_table, paired_differences

_COMPARISONS: Final = {
    "default": "Default clip values: each algorithm with the values it was published with. Clip rates differ, "
    "so a difference in LRE mixes the band's shape with its width.",
    "matched": "Matched clip rate: each algorithm's clip values were scaled so that all clip the same share of the "
    "same sequences; what is left is the band's shape.",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was written: the page, how many runs it reports on, how many planned ones are missing, what was wrong."""

    page: Path
    runs: int
    missing: int
    problems: list[str]


def build_report(paths: Sequence[Path], out: Path, *, title: str = "Length fairness report", bins: int = 8) -> Report:
    """Write ``report.html`` (self-contained), ``figures/*.png`` and ``summary.json``.

    Args:
        paths: Run folders, or folders with grid.json (docs/run-folder.md). Unreadable parts are named, not fatal.
        out: Folder for the files; made if needed. Each file is replaced whole.
        title: Title of the page.
        bins: Length bins of equal mass, formed over all runs of the report, so that groups are compared on the same.

    Returns:
        Where the page is, and what was wrong.
    """
    folders, planned, problems = expand_paths(list(paths))
    loaded = [load_run(folder) for folder in folders]
    problems += [problem for run in loaded for problem in run.problems]
    runs = _one_per_seed([run for run in loaded if run.steps or len(run.lengths.step_M)], problems)
    missing = sum(not plan.path.is_dir() for plan in planned)
    page = Page(title)
    page.paragraph(
        f"{len(runs)} runs reported, {missing} planned and not run. Means over seeds with 95% bootstrap "
        "intervals (from three seeds on); bands around curves are the range over seeds. Acceptance leaves out the "
        "first mini-batch of each step, where S = 0.",
        lead=True,
    )
    page.table(grid_table(planned, loaded), "runs")
    summary: dict[str, Any] = {"title": title, "problems": problems, "comparisons": {}}
    groups = group_runs(runs)
    starts = shared_starts(runs, bins) if runs else np.zeros(1, np.int64)
    # One pass over the runs: a measure is looked up several times per table.
    measures = [_cached(measure) for measure in standard_measures(runs, starts)]
    for comparison in dict.fromkeys(group.comparison for group in groups):
        chosen = [group for group in groups if group.comparison == comparison]
        summary["comparisons"][comparison] = _add_comparison(page, comparison, chosen, measures, starts, out)
    page.heading("What the words mean")
    page.paragraph(
        "LRE: sum over length bins of the bin's share times |acceptance of the bin / overall acceptance - 1|; "
        "debiased: with the share of the squared deviations that sampling noise explains taken out. The formula is "
        "this project's; the paper's exact one was not available."
    )
    views = [(view, "", [text]) for view, text in VIEWS.items()]
    page.table(Table(["counts as accepted"], views), "acceptance", prose=True)
    page.heading("What was run")
    page.table(_provenance(runs), "run", prose=True)
    if problems:
        page.heading("What could not be read")
        page.problems(problems)
    _replace(out / "summary.json", json.dumps(summary, indent=2).encode())
    _replace(out / "report.html", page.render().encode())
    return Report(out / "report.html", len(runs), missing, problems)


def _one_per_seed(runs: Sequence[Run], problems: list[str]) -> list[Run]:
    """Two runs of one group with one seed are not two samples: the one given last counts, and the other is named."""
    kept: dict[object, Run] = {}
    for run in runs:
        key = (run.comparison, run.algo, run.path if run.seed is None else run.seed)
        if key in kept:
            problems.append(
                f"{kept[key].path}: left out: {run.path} is a run of {run.algo} with the same seed {run.seed}"
            )
        kept[key] = run
    return list(kept.values())


def _add_comparison(
    page: Page,
    comparison: str,
    groups: Sequence[RunGroup],
    measures: Sequence[Measure],
    starts: npt.NDArray[np.int64],
    out: Path,
) -> dict[str, Any]:
    page.heading(f"Comparison: {comparison}")
    page.paragraph(_COMPARISONS.get(comparison, "A comparison named in run.json."))
    numbers = final_numbers(groups, measures)
    tables = {"final": numbers}
    page.heading("Final numbers", 3)
    page.table(numbers, "mean [95% interval over seeds]")
    paired = paired_differences(groups, measures, starts)
    if paired is not None:
        page.heading("Paired differences", 3)
        page.paragraph("Over the seeds that both have. Bold: the 95% interval excludes 0.")
        page.table(paired, "difference [95% interval]")
        tables["paired"] = paired
    page.heading("Figures", 3)
    page.figures(_pictures(groups, starts, out / "figures", comparison))
    common = common_record_table(common_records(groups, starts))
    if common is not None:
        page.heading("All bands on the same recorded sequences", 3)
        page.paragraph(
            "Debiased LRE by symmetric acceptance, 95% interval over mini-batches. Above, each algorithm was measured "
            "on its own run; here only the band differs. Matched clips have an overall clip rate of "
            f"{MATCHED_CLIP_RATE:.0%} on the records of the column."
        )
        page.table(common, "band")
        tables["common_records"] = common
    attributes = attribute_table(groups)
    if attributes is not None:
        page.heading("Acceptance by other attributes than length", 3)
        page.paragraph(
            "Runs pooled, 95% interval over steps. Groups of sequences differ in length too, so a difference is not an "
            "effect of the attribute by itself."
        )
        page.table(attributes, "attribute")
        tables["attributes"] = attributes
    return {name: dataclasses.asdict(table) for name, table in tables.items()}


def _pictures(
    groups: Sequence[RunGroup], starts: npt.NDArray[np.int64], folder: Path, comparison: str
) -> list[tuple[str, bytes, bytes]]:
    drawn: dict[str, dict[str, bytes]] = {}
    texts: dict[str, str] = {}
    for theme in THEMES:
        with themed(theme):
            for figure in comparison_figures(groups, starts, theme):
                drawn.setdefault(figure.name, {})[theme.name] = png_bytes(figure.figure)
                texts[figure.name] = figure.alternative
    for name, pictures in drawn.items():
        _replace(folder / f"{comparison}_{name}.png", pictures["light"])
    return [(texts[name], pictures["light"], pictures["dark"]) for name, pictures in drawn.items()]


def _provenance(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        settings = run_settings(run)
        clips = f"{settings.band}, {settings.clip_low:g} / {settings.clip_high:g}" if settings else ""
        versions = run.info.get("versions")
        shown = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""
        command = run.info.get("command", "")
        command = " ".join(map(str, command)) if isinstance(command, list) else str(command)
        commit = f"{run.info.get('commit') or ''}{' + changes' if run.info.get('dirty') else ''}"
        rows.append((f"{run.algo}, seed {run.seed}", run.comparison, [clips, commit, command, shown]))
    return Table(["band, clip low / high", "commit", "command", "versions"], rows)


def _cached(measure: Measure) -> Measure:
    known: dict[int, float | None] = {}

    def of(run: Run) -> float | None:
        if id(run) not in known:
            known[id(run)] = measure.of(run)
        return known[id(run)]

    return dataclasses.replace(measure, of=of)


def _replace(path: Path, content: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)
