"""Puts a report together: reads run folders, draws the figures, fills the tables, and writes the files."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jinja2
import numpy as np
import numpy.typing as npt

from fspo.acceptance import VIEWS
from fspo.files import atomic_path, check_folder, is_own_json
from fspo.noise_floor import NoiseFloor
from fspo.report.by_attribute import attribute_table
from fspo.report.common_records import MATCHED_CLIP_RATE, common_records
from fspo.report.figures import comparison_figures
from fspo.report.findings import Finding, compared, differing_settings, findings, mixed_settings
from fspo.report.funnel import funnel_finding, funnel_table
from fspo.report.groups import (
    LengthProfile,
    Measure,
    RunGroup,
    clip_profiles,
    group_noise_floor,
    group_runs,
    shared_starts,
    standard_measures,
)
from fspo.report.runs import Run, expand_paths, load_run
from fspo.report.samples import shown_samples
from fspo.report.style import styled
from fspo.report.tables import (
    NOT_RUN,
    Table,
    common_record_table,
    final_numbers,
    grid_table,
    paired_differences,
    provenance_table,
)

_TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.PackageLoader("fspo.report", "."),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


@dataclass(frozen=True, slots=True)
class Report:
    """The page that was written, how many runs it reports on, how many planned ones are missing, what was wrong."""

    page: Path
    runs: int
    missing: int
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as the page shows it: texts in its place and below, and a PNG in base64."""

    alternative: str
    caption: str
    png: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the page shows of the groups of one comparison; of its tables only those with content."""

    name: str
    compared: Table
    findings: list[Finding]
    noise_floor: list[tuple[str, str]]
    tables: dict[str, Table | None]
    pictures: dict[str, Picture]


def build_report(paths: Sequence[Path], out: Path, *, title: str = "Length fairness report", bins: int = 8) -> Report:
    """Write ``report.html`` (self-contained), ``figures/*.png`` and ``summary.json``.

    Args:
        paths: Run folders, or folders with grid.json (docs/run-folder.md). What cannot be read is named in the report.
        out: Folder for the files; made if needed. Each file is replaced whole.
        title: Title of the page.
        bins: Length bins of equal mass, formed over all runs of the report, so that all groups have the same.

    Returns:
        Where the page is, and what was wrong.

    Raises:
        OSError: If ``out`` cannot be written to, or holds a file of those names that no report has written.
    """
    _check_out(out)
    folders, planned, problems = expand_paths(list(paths))
    loaded = [load_run(folder) for folder in folders]
    problems += [problem for run in loaded for problem in run.problems]
    runs = _one_per_seed([run for run in loaded if run.steps or len(run.lengths.step_M)], problems)
    missing = sum(not folder.is_dir() for folder in planned)
    groups = group_runs(runs)
    starts = shared_starts(runs, bins) if runs else np.zeros(1, np.int64)
    # One pass over the runs: a measure is looked up several times per table.
    measures = [_cached(measure) for measure in standard_measures(runs, starts)]
    comparisons = []
    for name in dict.fromkeys(group.comparison for group in groups):
        chosen = [group for group in groups if group.comparison == name]
        settings = differing_settings(chosen)
        problems += mixed_settings(chosen, settings)
        profiles = clip_profiles(chosen, starts)
        floors = {group.algo: group_noise_floor(group, starts) for group in chosen}
        comparisons.append(
            Comparison(
                name,
                compared(chosen, settings),
                findings(chosen, profiles, measures, starts) + funnel_finding(chosen, bins),
                [(algo, floor) for algo, floor in floors.items() if isinstance(floor, str)],
                _tables(chosen, measures, starts, bins),
                _draw(chosen, profiles, floors, out / "figures", name),
            )
        )
    samples = shown_samples(runs, problems)
    page = _TEMPLATES.get_template("page.html").render(
        title=title,
        runs=len(runs),
        missing=missing,
        grid=grid_table(planned, loaded),
        not_run=NOT_RUN,
        comparisons=comparisons,
        matched_clip_rate=f"{MATCHED_CLIP_RATE:.0%}",
        views=VIEWS,
        provenance=provenance_table(runs),
        samples=samples,
        filters={name: list(dict.fromkeys(each.tags[name] for each in samples)) for name in samples[0].tags}
        if samples
        else {},
        problems=problems,
    )
    summary = {
        "title": title,
        "problems": problems,
        "comparisons": {
            each.name: {"findings": [dataclasses.asdict(finding) for finding in each.findings]}
            | {name: dataclasses.asdict(table) for name, table in each.tables.items() if table is not None}
            for each in comparisons
        },
    }
    _write(out / "summary.json", json.dumps(summary, indent=2).encode())
    _write(out / "report.html", page.encode())
    return Report(out / "report.html", len(runs), missing, problems)


def _check_out(out: Path) -> None:
    check_folder(out)
    page, summary = out / "report.html", out / "summary.json"
    if (page.exists() or summary.exists()) and not is_own_json(summary, "comparisons"):
        path = summary if summary.exists() else page
        raise FileExistsError(f"{path} exists and was not written by a report: give another folder, or move it")


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


def _tables(
    groups: Sequence[RunGroup], measures: Sequence[Measure], starts: npt.NDArray[np.int64], bins: int
) -> dict[str, Table | None]:
    return {
        "final": final_numbers(groups, measures),
        "paired": paired_differences(groups, measures),
        "common_records": common_record_table(common_records(groups, starts), groups),
        "attributes": attribute_table(groups),
        "funnel": funnel_table(groups, bins),
    }


def _draw(
    groups: Sequence[RunGroup],
    profiles: Mapping[str, Mapping[str, LengthProfile | None]],
    floors: Mapping[str, NoiseFloor | str],
    folder: Path,
    comparison: str,
) -> dict[str, Picture]:
    """Draw the figures, for the page and as files."""
    pictures = {}
    with styled():
        for drawn in comparison_figures(groups, profiles, floors):
            buffer = io.BytesIO()
            drawn.figure.savefig(buffer, format="png", dpi=120)
            _write(folder / f"{comparison}_{drawn.name}.png", buffer.getvalue())
            png = base64.b64encode(buffer.getvalue()).decode()
            pictures[drawn.name] = Picture(drawn.alternative, drawn.caption, png)
    return pictures


def _cached(measure: Measure) -> Measure:
    known: dict[int, float | None] = {}

    def of(run: Run) -> float | None:
        if id(run) not in known:
            known[id(run)] = measure.of(run)
        return known[id(run)]

    return dataclasses.replace(measure, of=of)


def _write(path: Path, content: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)
