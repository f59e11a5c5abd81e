"""``python -m benchmarks.studies``: the tables and figures of README.md, docs/results.md and docs/studies, from
benchmarks/study; ``python -m benchmarks.studies figures``: the figures alone.

``python -m benchmarks.studies clip_values FOLDER``: the tables of the open study, from its runs or its records. The
code of a closed study is at the commit that its page names.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.pages import Table, opened, write_tables
from benchmarks.studies import clip_values, figures, grids
from fspo.losses import BANDS
from fspo.report.groups import group_runs, shared_starts
from fspo.report.runs import expand_paths, load_run


@dataclass(frozen=True)
class Grid:
    """A grid of ``python -m recipe.fspo.compare`` in benchmarks/study.

    ``archive`` and the folder in it; ``common``: whether the same records are judged with other bands; ``measured``:
    and with measured ones; ``spread``: the clip values of the runs whose spread is shown where ``common`` shows none.
    """

    archive: str
    folder: str = "."
    common: bool = False
    measured: bool = False
    spread: str | None = None


#: By the first word of its tables' names.
GRIDS: Final = {
    "demo": Grid("records", common=True, measured=True),
    "words": Grid("words", common=True),
    "pretrained": Grid("pretrained", common=True, measured=True),
    "clipping": Grid("clipping", "comparison-4", spread="matched_active"),
}
#: By setting of the results page's table: table, and clip values; of common records those of FSPO's runs.
SETTINGS: Final = {
    "demo": ("demo", "own", "matched"),
    "demo, 7 times the learning rate": ("clipping", "own", "matched_active"),
    "sorted words": ("words", "common", "matched"),
    "SmolLM2-135M": ("pretrained", "common", "matched"),
}


def grid_tables(name: str) -> dict[str, Table]:
    """The tables of one of :data:`GRIDS`, by the names of their files."""
    grid = GRIDS[name]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(opened(figures.STUDY / f"{grid.archive}.tar.xz")) / grid.folder
        tables = grids.tables(folder, grid.common, grid.measured)
        if grid.spread is not None:
            runs = [run for run in map(load_run, expand_paths([folder])[0]) if run.clip_values == grid.spread]
            tables["spread"] = grids.spread_table(group_runs(runs), shared_starts(runs))
    return {f"{name}-{kind}": table for kind, table in tables.items()}


def settings_table(tables: Mapping[str, Table]) -> Table:
    """The results page's table: spread of S in FSPO's runs, symmetric LRE of three bands at a matched clip rate."""
    rows = [["setting", "a in std(S) ~ L^a", *BANDS]]
    for setting, (grid, kind, origin) in SETTINGS.items():
        errors = {
            row[-4].partition(" (")[0]: row[-3].partition(" (")[0]
            for row in tables[f"{grid}-{kind}"]
            if row[0] in (origin, "fspo") and row[-5] == origin
        }
        exponent = next(row[1] for row in tables[f"{grid}-spread"] if row[0] == "fspo")
        rows.append([setting, exponent, *(errors[band] for band in BANDS)])
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", choices=("clip_values", "figures"), help="only this study, or figures")
    parser.add_argument("folder", nargs="?", type=Path, help="its runs (see docs/studies), or benchmarks/study")
    asked = parser.parse_args()
    if asked.study == "figures":
        figures.draw()
        return 0
    if asked.study is not None:
        if asked.folder is None:
            parser.error("clip_values needs a FOLDER: that of its runs, or benchmarks/study for its records")
        write_tables({f"clip-values-{kind}": table for kind, table in clip_values.tables(asked.folder).items()})
        return 0
    tables = {name: table for grid in GRIDS for name, table in grid_tables(grid).items()}
    tables["settings"] = settings_table(tables)
    tables |= {f"clip-values-{kind}": table for kind, table in clip_values.tables(figures.STUDY).items()}
    write_tables(tables)
    figures.draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
