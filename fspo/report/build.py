"""Puts a report together: reads runs, draws the figures, fills the tables, and writes the page."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
from matplotlib import style

from fspo.audit.show import by_length, what_follows
from fspo.files import atomic_path, read_object, write_json
from fspo.report.compare import Table, final_numbers, heads, paired_differences, verdicts
from fspo.report.figures import STYLE, figures
from fspo.report.runs import Group, differing_settings, group_runs, load_runs

_TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.PackageLoader("fspo.report", "."),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
#: In each page that a report has written.
_MARK: Final = '<meta name="generator" content="fspo.report">'


@dataclass(frozen=True, slots=True)
class Report:
    """The page that was written, how many runs it reports on, and what was wrong with them."""

    page: Path
    runs: int
    problems: list[str]


class NothingReadError(ValueError):
    """No run could be read; the text is a problem a line."""


def build_report(paths: Sequence[Path], out: Path, every_mini_batch: bool = False) -> Report:
    """Write ``report.html`` (self-contained) and ``summary.json``.

    Args:
        paths: Folders of runs (docs/runs.md) or folders with some below, folders of an audit, parquet files of S, L and
            A. What cannot be read is named in the report.
        out: Folder for the files; made if needed. Each file is replaced whole.
        every_mini_batch: As of :func:`fspo.audit.read_audit`.

    Returns:
        Where the page is, and what was wrong.

    Raises:
        OSError: If ``out`` cannot be written to, or holds a file of those names that no report has written.
        NothingReadError: If there is no run in any of the paths. Nothing is written.
    """
    page, summary = out / "report.html", out / "summary.json"
    foreign = [page] if page.exists() and _MARK not in page.read_text(encoding="utf-8", errors="replace") else []
    foreign += [summary] if summary.exists() and "verdicts" not in read_object(summary) else []
    if foreign:
        raise FileExistsError(f"{foreign[0]} exists and was not written by a report: give another folder, or move it")
    loaded = [run for path in dict.fromkeys(paths) for run in load_runs(path, every_mini_batch)]
    problems: list[str] = []
    runs = [run for run in loaded if run.steps or len(run.responses)]
    if not runs:
        raise NothingReadError("\n".join(problem for run in loaded for problem in run.problems))
    groups = group_runs(runs, problems)
    tables = {"settings": _compared(groups), "final": final_numbers(groups), "paired": paired_differences(groups)}
    shown: dict[str, Any] = {name: dataclasses.asdict(table) for name, table in tables.items() if table and table.rows}
    said = verdicts(groups)
    # All groups of a file have the same responses.
    alone = runs[0] if len({run.path for run in runs}) == 1 and len(runs[0].responses) else None
    follows = what_follows(alone.records) if alone else []
    problems += list(dict.fromkeys(problem for run in loaded for problem in run.problems))
    text = _TEMPLATES.get_template("page.html").render(
        mark=_MARK,
        title=f"Clipping by response length: {', '.join(group.name for group in groups)}",
        verdicts=said,
        follows=follows,
        pictures=_pictures(groups),
        tables=shown,
        by_length={group.name: dataclasses.asdict(_by_length(group)) for group in groups if len(group.responses)},
        problems=problems,
    )
    write_json(summary, {"verdicts": said, "follows": follows, **shown, "problems": problems})
    with atomic_path(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Report(page, len(runs), problems)


def _compared(groups: Sequence[Group]) -> Table:
    """Seeds and steps of each group, and the settings that are not the same in all runs."""
    rows = []
    if any(run.info for group in groups for run in group.runs):
        facts = [[(run.seed, run.last_step, run.status) for run in group.runs] for group in groups]
        for place, head in enumerate(("seeds", "steps", "status")):
            rows.append((head, "", [", ".join(dict.fromkeys(str(one[place]) for one in of)) for of in facts]))
    rows += [(key.rpartition(".")[2], key, values) for key, values in differing_settings(groups).items()]
    return Table(heads(groups), rows)


def _by_length(group: Group) -> Table:
    """What the group's clip and others do by length, as its audit prints it."""
    columns = by_length(group.responses, group.runs[0].records.accept)
    first, *others = columns
    rows = zip(*(columns[name] for name in others), strict=True)
    return Table(others, [(head, "", list(cells)) for head, cells in zip(columns[first], rows, strict=True)])


def _pictures(groups: Sequence[Group]) -> dict[str, str]:
    """Each figure as a PNG in base64, by its name."""
    pictures = {}
    with style.context(STYLE):
        for name, figure in figures(groups):
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png")
            pictures[name] = base64.b64encode(drawn.getvalue()).decode()
    return pictures
