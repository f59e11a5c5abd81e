"""``python -m benchmarks.studies STUDY FOLDER``: runs what is missing of a study, and writes its tables.

FOLDER holds the study's runs; with ``--tables`` nothing is run, and FOLDER may be an archive of them (.tar.xz).
Interrupted, the same command goes on. The runs of ``tables``, ``words``, ``active`` and ``pretrained``, sections of
docs/fairness-study.md, are one grid of ``python -m recipe.fspo.compare`` each, whose command is on the page.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Final

from benchmarks.pages import opened, write_section
from benchmarks.studies import alignment, asynchronous, clipping, fairness

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
GRIDS: Final = ("tables", "words", "active", "pretrained")
STUDIES: Final = {"clipping": clipping, "async": asynchronous, "alignment": alignment}
PAGES: Final = dict.fromkeys((*GRIDS, "clipping"), DOCS / "fairness-study.md") | {
    "async": DOCS / "async-study.md",
    "alignment": DOCS / "alignment.md",
}


def sections(study: str, records: Path, beside: Path | None = None) -> dict[str, str]:
    """The sections of the study's page, from its runs; ``beside``: a grid that the active band's runs are held to."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(opened(records))
        if study in STUDIES:
            return STUDIES[study].sections(folder)
        return fairness.sections(folder, study, beside and stack.enter_context(opened(beside)))


def main() -> int:
    """Command line; the exit status of a run that failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=PAGES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--beside", type=Path, metavar="GRID", help="compare the active band's runs with those of it")
    asked = parser.parse_args()
    code = 0
    if asked.study in STUDIES and not asked.tables:
        code = STUDIES[asked.study].run_missing(asked.folder.absolute())
    for section, text in sections(asked.study, asked.folder, asked.beside).items():
        write_section(PAGES[asked.study], section, text)
    return code


if __name__ == "__main__":
    sys.exit(main())
