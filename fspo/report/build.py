"""Puts a report together: reads runs, draws the figures, fills the tables, and writes the page; and a run's summary."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jinja2
from matplotlib import style

from fspo.audit.show import NOT_MOVED, by_length, verdict, what_follows
from fspo.files import METRICS_FILE, atomic_path, write_json
from fspo.report.compare import Table, final_numbers, heads, paired_differences, problems_interval, verdicts
from fspo.report.figures import STYLE, figures
from fspo.report.runs import Group, differing_settings, group_runs, load_runs

_TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.PackageLoader("fspo.report", "."),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
#: What stands in each file that a report has written.
_MARKS: Final = {"report.html": '<meta name="generator" content="fspo.report">', "summary.json": '"verdicts":'}
#: Share of a step's responses cut at the maximum length from which it is said.
_MANY: Final = 0.1


def build_report(paths: Sequence[Path], out: Path, every_mini_batch: bool = False) -> tuple[Path, int, list[str]]:
    """Write ``report.html`` (self-contained) and ``summary.json``; returns the page, how many runs, and what is wrong.

    Args:
        paths: Folders of runs (docs/runs.md) or folders with some below, folders of an audit, parquet files of S, L and
            A. What cannot be read is named in the report.
        out: Folder for the files; made if needed. Each file is replaced whole.
        every_mini_batch: As of :func:`fspo.audit.read_audit`.

    Raises:
        OSError: If ``out`` cannot be written to, or holds a file of those names that no report has written; if there is
            no run in any of the paths. Nothing is written.
    """
    for name, mark in _MARKS.items():
        if (out / name).exists() and mark not in (out / name).read_text(encoding="utf-8", errors="replace"):
            what = "exists and was not written by a report: give another folder, or move it"
            raise FileExistsError(f"{out / name} {what}")
    loaded = [run for path in dict.fromkeys(paths) for run in load_runs(path, every_mini_batch)]
    runs = [run for run in loaded if run.steps or len(run.responses)]
    problems = list(dict.fromkeys(problem for run in loaded for problem in run.problems))
    if not runs:
        raise FileNotFoundError("\n".join(["no run could be read, and nothing is written", *problems]))
    groups = group_runs(runs, problems)
    # All groups of a file have the same responses.
    alone = runs[0] if len({run.path for run in runs}) == 1 and len(runs[0].responses) else None
    tables = {"settings": _compared(groups), "final": final_numbers(groups), "paired": paired_differences(groups)}
    summary = {
        "verdicts": verdicts(groups),
        "follows": what_follows(alone.records, alone.records.accept) if alone else [],
        **{name: dataclasses.asdict(table) for name, table in tables.items() if table.rows},
        "problems": problems,
    }
    text = _TEMPLATES.get_template("page.html").render(
        mark=_MARKS["report.html"],
        title=f"Clipping by response length: {', '.join(group.name for group in groups)}",
        pictures=_pictures(groups),
        by_length={group.name: _by_length(group) for group in groups if len(group.responses)},
        **summary,
    )
    write_json(out / "summary.json", summary)
    with atomic_path(out / "report.html") as temporary:
        temporary.write_text(text, encoding="utf-8")
    return out / "report.html", len(runs), problems


def _compared(groups: Sequence[Group]) -> Table:
    """Seeds and steps of each group, and the settings that are not the same in all runs."""
    rows = []
    if any("status" in run.info for group in groups for run in group.runs):
        facts = [[(run.seed, run.last_step, run.info.get("status")) for run in group.runs] for group in groups]
        for place, head in enumerate(("seeds", "steps", "status")):
            rows.append((head, "", [", ".join(dict.fromkeys(str(one[place]) for one in of)) for of in facts]))
    rows += [(key.rpartition(".")[2], key, values) for key, values in differing_settings(groups).items()]
    return Table(heads(groups), rows)


def _by_length(group: Group) -> Table:
    """What the group's clip and others do by length, as its audit prints it."""
    (_, lengths), *columns = by_length(group.responses, group.runs[0].records.accept).items()
    rows = zip(lengths, zip(*(cells for _, cells in columns), strict=True), strict=True)
    return Table([head for head, _ in columns], [(length, "", list(cells)) for length, cells in rows])


def _pictures(groups: Sequence[Group]) -> dict[str, str]:
    """Each figure as a PNG in base64, by its name."""
    pictures = {}
    with style.context(STYLE):
        for name, figure in figures(groups):
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png")
            pictures[name] = base64.b64encode(drawn.getvalue()).decode()
    return pictures


def summarise(folder: Path) -> str:
    """Write a finished run's report into its folder; returns the lines that say how it went and where everything is."""
    (run,), lines = load_runs(folder), []
    for name in run.validation_metrics():
        steps, values = run.series(name)
        lines.append(f"held-out {name.removeprefix('val-core/')}")
        for place in dict.fromkeys((0, len(steps) - 1)):
            when = {0: "before", run.last_step: "after "}.get(int(steps[place]), "during")
            text = f"  {when} (step {steps[place]}): {values[place]:.3f}"
            if (over := problems_interval([run], name, values[place])) is not None:
                text += f"  95% interval [{over[1]:.3f}, {over[2]:.3f}] over {over[0]} problems"
            lines.append(text)
    steps, cut = run.series("fspo/truncated_frac")
    if len(cut) and cut[-1] >= _MANY:
        lines.append(f"note: in step {steps[-1]} {cut[-1]:.0%} of the responses were cut at data.max_response_length")
    if run.last_step > 0:
        lines.append(f"by length, all steps: {verdict(run.responses) if len(run.responses) else NOT_MOVED}")
    lines += [f"status: {run.info.get('status')}", f"metrics: {folder / METRICS_FILE}"]
    try:
        lines.append(f"report: {build_report([folder], folder)[0]}")
    except OSError as error:
        lines.append(f"report: none ({error})")
    return "\n".join(lines)
