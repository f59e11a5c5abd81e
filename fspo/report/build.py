"""Puts a report together: reads run folders, draws the figures, fills the tables, and writes the files."""

from __future__ import annotations

import base64
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
from matplotlib import style

from fspo.audit.description import what_follows
from fspo.audit.reading import read_audit
from fspo.clip import ACCEPT
from fspo.files import atomic_path, check_folder, write_json
from fspo.records import read_object
from fspo.report.common_records import common_record_table
from fspo.report.figures import STYLE, Look, algo_looks, comparison_figures
from fspo.report.findings import clip_values_in_words, compared, differing_settings, findings
from fspo.report.groups import Profiles, RunGroup, clip_profiles, group_runs, standard_measures
from fspo.report.runs import Run, expand_paths, load_runs
from fspo.report.tables import NOT_RUN, final_numbers, grid_table, paired_differences
from fspo.responses import VIEWS

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


class NothingReadError(ValueError):
    """No run could be read; the text is a problem a line."""


def build_report(paths: Sequence[Path], out: Path, *, title: str | None = None) -> Report:
    """Write ``report.html`` (self-contained), ``figures/*.png`` and ``summary.json``.

    Args:
        paths: Run folders, folders with grid.json (docs/runs.md), folders of an audit, parquet files of S, L
            and A. What cannot be read is named in the report.
        out: Folder for the files; made if needed. Each file is replaced whole.
        title: Title of the page; None: the algorithms and the days on which the runs began.

    Returns:
        Where the page is, and what was wrong.

    Raises:
        OSError: If ``out`` cannot be written to, or holds a file of those names that no report has written.
        NothingReadError: If there is no run in any of the paths. Nothing is written.
    """
    page, summary = out / "report.html", out / "summary.json"
    check_folder(out)
    if (page.exists() or summary.exists()) and "comparisons" not in read_object(summary):
        path = summary if summary.exists() else page
        raise FileExistsError(f"{path} exists and was not written by a report: give another folder, or move it")
    folders, planned, problems = expand_paths(list(paths))
    loaded = [run for folder in folders for run in load_runs(folder)]
    for run in loaded:
        run.info["clip_values_asked"] = run.clip_values
        if run.path in planned:  # a loss without clip values to measure stands beside those that have some
            run.info["clip_values"] = planned[run.path].clip_values
    runs = _one_per_seed([run for run in loaded if run.steps or len(run.responses)], problems)
    follows = _what_follows(folders[0]) if runs and len(folders) == 1 else []
    missing = sum(not folder.is_dir() for folder in planned)
    if not runs and not planned:
        raise NothingReadError("\n".join([*problems, *(problem for run in loaded for problem in run.problems)]))
    comparisons = _comparisons(runs, out / "figures") if runs else []
    problems += [problem for run in loaded for problem in run.problems]  # now that all files have been read
    if title is None:
        days = sorted({start["started"][:10] for run in runs for start in run.info.get("starts", ())[:1]})
        algos = ", ".join(dict.fromkeys(group.algo for group in group_runs(runs))) or "no runs"
        title = (
            f"Clipping by response length: {algos}"
            + f" ({' to '.join(dict.fromkeys(days[:1] + days[-1:]))})" * bool(days)
        )
    text = _TEMPLATES.get_template("page.html").render(
        title=title,
        runs=len(runs),
        missing=missing,
        grid=grid_table(planned, loaded),
        not_run=NOT_RUN,
        follows=follows,
        comparisons=comparisons,
        accept=f"{runs[0].accept if runs else ACCEPT:.0%}",
        views=VIEWS,
        problems=problems,
    )
    numbers = {part["name"]: {"findings": part["findings"]} | part["tables"] for part in comparisons}
    write_json(summary, {"title": title, "problems": problems, "follows": follows, "comparisons": numbers})
    with atomic_path(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Report(page, len(runs), missing, problems)


def _what_follows(path: Path) -> list[str]:
    """What the audit of one run's records prints below its tables; see :func:`fspo.audit.description.what_follows`."""
    records = read_audit(path)
    return what_follows(records) if len(records.responses.moved()) else []


def _one_per_seed(runs: Sequence[Run], problems: list[str]) -> list[Run]:
    """Two runs of one group with one seed are not two samples: the one given last counts, and the other is named."""
    kept: dict[object, Run] = {}
    for run in runs:
        key = (run.clip_values, run.algo, run.path if run.seed is None else run.seed)
        if key in kept:
            problems.append(
                f"{kept[key].path}: left out: {run.path} is a run of {run.algo} with the same seed {run.seed}"
            )
        kept[key] = run
    return list(kept.values())


def _comparisons(runs: Sequence[Run], figures: Path) -> list[dict[str, Any]]:
    """What the page shows of each comparison; of its tables only those with content."""
    groups = group_runs(runs)
    # A measure of a run is looked up several times per table.
    measures = [dataclasses.replace(m, of=functools.cache(m.of)) for m in standard_measures(runs)]
    looks = algo_looks([group.algo for group in groups])
    comparisons = []
    for number, name in enumerate(dict.fromkeys(group.clip_values for group in groups), 1):
        chosen = [group for group in groups if group.clip_values == name]
        settings, profiles = differing_settings(chosen), clip_profiles(chosen)
        tables = {
            "final": final_numbers(chosen, measures),
            "paired": paired_differences(chosen, measures),
            "common_records": common_record_table(chosen, profiles["symmetric"], chosen[0].runs[0].accept),
        }
        comparisons.append(
            {
                "name": name,
                "compared": (sides := compared(chosen, settings)),
                "steps": next((cells for head, key, cells in sides.rows if (head, key) == ("steps", "")), []),
                "settings": [head for head, key, _ in sides.rows if key],
                "clipped": clip_values_in_words(chosen, next(m for m in measures if m.label == "clip rate")),
                "findings": [dataclasses.asdict(finding) for finding in findings(chosen, profiles, measures)],
                "tables": {key: dataclasses.asdict(table) for key, table in tables.items() if table is not None},
                "pictures": _draw(chosen, profiles, looks, figures / f"comparison{number}"),
            }
        )
    return comparisons


def _draw(
    groups: Sequence[RunGroup], profiles: Profiles, looks: Mapping[str, Look], prefix: Path
) -> dict[str, dict[str, str]]:
    """Draw the figures as files; for the page each one's title, and its PNG in base64.

    Files are numbered where the figure is named after an algorithm: a name in run.json may be a path.
    """
    numbered = {f"distribution_{group.algo}": f"distribution{number}" for number, group in enumerate(groups, 1)}
    pictures = {}
    with style.context(STYLE):
        for name, title, figure in comparison_figures(groups, profiles, looks):
            with atomic_path(prefix.with_name(f"{prefix.name}_{numbered.get(name, name)}.png")) as temporary:
                figure.savefig(temporary, format="png")
                pictures[name] = {"title": title, "png": base64.b64encode(temporary.read_bytes()).decode()}
    return pictures
