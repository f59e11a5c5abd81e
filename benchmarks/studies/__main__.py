"""``python -m benchmarks.studies STUDY FOLDER``: runs what is missing of a study, and writes its tables.

FOLDER holds the study's runs; with ``--tables`` nothing is run, and FOLDER may be an archive of them (.tar.xz).
Interrupted, the same command goes on. The tables are docs/tables/STUDY-*.csv. The runs of ``tables`` (whose files begin
with ``demo``), ``words``, ``active`` and ``pretrained`` are one grid of ``python -m recipe.fspo.compare`` each.
``clip_fraction`` has no runs of its own: its FOLDER is that of the other studies' archives. ``async``, ``clip_values``,
``clipping``, ``defaults``, ``masks`` and ``evidence`` read records only.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Final

from benchmarks.pages import Table, opened, write_tables
from benchmarks.studies import alignment, asynchronous, clip_fraction, clip_values, clipping, evidence, fairness, masks

GRIDS: Final = ("tables", "words", "active", "pretrained")
STUDIES: Final = {"alignment": alignment}
#: Studies whose folder holds records.
READ_ONLY: Final = {
    "async": asynchronous.tables,
    "clip_values": clip_values.tables,
    "clipping": clipping.tables,
    "defaults": asynchronous.defaults,
    "masks": masks.tables,
    "evidence": evidence.tables,
}


def tables(study: str, records: Path, beside: Path | None = None) -> dict[str, Table]:
    """The study's tables by name, from its runs; ``beside``: a grid that the active band's runs are held to."""
    if study == "clip_fraction":
        return {"clip-fraction": clip_fraction.table(records)}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(opened(records))
        if study in READ_ONLY:
            named = READ_ONLY[study](folder)
        elif study in STUDIES:
            named = STUDIES[study].tables(folder)
        else:
            named = fairness.grid_tables(folder, study, beside and stack.enter_context(opened(beside)))
    title = {"tables": "demo", "defaults": "async", "clip_values": "clip-values"}.get(study, study)
    return {f"{title}-{name}": table for name, table in named.items()}


def main() -> int:
    """Command line; the exit status of a run that failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=(*GRIDS, *STUDIES, *READ_ONLY, "clip_fraction"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--gather", type=Path, metavar="RUNS", help="of evidence and masks: write FOLDER's files first")
    parser.add_argument("--beside", type=Path, metavar="GRID", help="compare the active band's runs with those of it")
    asked = parser.parse_args()
    code = 0
    if asked.gather is not None:
        (masks if asked.study == "masks" else evidence).gather(asked.gather, asked.folder)
    if asked.study in STUDIES and not asked.tables:
        code = STUDIES[asked.study].run_missing(asked.folder.absolute())
    write_tables(tables(asked.study, asked.folder, asked.beside))
    return code


if __name__ == "__main__":
    sys.exit(main())
