"""``python -m benchmarks.studies STUDY FOLDER``: runs what is missing of a study, and writes its tables.

FOLDER holds the study's runs; with ``--tables`` nothing is run, and FOLDER may be an archive of them (.tar.xz).
Interrupted, the same command goes on. The runs of ``tables``, ``words``, ``active`` and ``pretrained``, sections of
docs/fairness-study.md, are one grid of ``python -m recipe.fspo.compare`` each, whose command is on the page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from benchmarks.pages import opened, write_section
from benchmarks.studies import alignment, asynchronous, clipping, fairness

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
GRIDS: Final = ("tables", "words", "active", "pretrained")
STUDIES: Final = {
    "clipping": (clipping, "fairness-study.md"),
    "async": (asynchronous, "async-study.md"),
    "alignment": (alignment, "alignment.md"),
}


def main() -> int:
    """Command line; the exit status of a run that failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=(*GRIDS, *STUDIES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--beside", type=Path, metavar="GRID", help="compare the active band's runs with those of it")
    asked = parser.parse_args()
    code = 0
    if asked.study in GRIDS:
        page = DOCS / "fairness-study.md"
        with opened(asked.folder) as grid:
            if asked.beside is None:
                found = fairness.sections(grid, asked.study)
            else:
                with opened(asked.beside) as other:
                    found = fairness.sections(grid, asked.study, other)
    else:
        study, name = STUDIES[asked.study]
        page = DOCS / name
        if not asked.tables:
            code = study.run_missing(asked.folder.absolute())
        with opened(asked.folder) as folder:
            found = study.sections(folder)
    for section, text in found.items():
        write_section(page, section, text)
    return code


if __name__ == "__main__":
    sys.exit(main())
