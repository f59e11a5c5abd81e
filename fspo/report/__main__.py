"""``python -m fspo.report RUN [RUN ...] --out DIR``: see :func:`fspo.report.build.build_report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fspo.files import piped
from fspo.reading import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Exit status: 0, or 2 if not one run could be read or the report cannot be written."""
    try:
        from fspo.report.build import NothingReadError, build_report
    except ModuleNotFoundError as error:
        print(f"error: {error}: python -m fspo.report needs pip install 'fspo[report]'", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m fspo.report", description="Report on training runs.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, a folder with grid.json, audits, parquet"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for report.html and figures/")
    parser.add_argument("--title", help="title of the page (default: the algorithms and the days)")
    options = parser.parse_args(arguments)
    try:
        report = build_report(options.runs, options.out, title=options.title)
    except OSError as error:
        print(printable(f"error: --out {options.out}: {error}"), file=sys.stderr)
        return 2
    except NothingReadError as error:
        print(*map(printable, str(error).splitlines()), sep="\n", file=sys.stderr)
        print("error: no run could be read, and nothing is written: give folders of runs or audits", file=sys.stderr)
        return 2
    for problem in report.problems:
        print(printable(problem), file=sys.stderr)
    print(printable(f"{report.runs} run{'s' * (report.runs != 1)}, {report.missing} not run: {report.page}"))
    return 0 if report.runs else 2


if __name__ == "__main__":
    raise SystemExit(piped(main))
