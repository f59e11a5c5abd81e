"""``python -m fspo.report RUN [RUN ...] --out DIR``: see :func:`fspo.report.build.build_report`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Exit status: 0, or 2 if not one run could be read or the report cannot be written."""
    try:
        from fspo.report.build import build_report
    except ModuleNotFoundError as error:
        print(f"error: {error}: python -m fspo.report needs pip install 'fspo[report]'", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m fspo.report", description="Report on training runs.")
    what = "folders of runs, or with runs below them; audits; parquet files of S, L and A"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=what)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for report.html, summary.json")
    every = "mini-batches before which no weight had moved count, too, where records do not say (python -m fspo.audit)"
    parser.add_argument("--every-mini-batch", action="store_true", help=every)
    options = parser.parse_args(arguments)
    try:
        page, runs, problems = build_report(options.runs, options.out, options.every_mini_batch)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr)
    print(f"{runs} run{'s' * (runs != 1)}: {page}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends as other programs do where the reader has gone, as head does
    sys.exit(main())
