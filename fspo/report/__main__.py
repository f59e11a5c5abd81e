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
        from fspo.report.build import NothingReadError, build_report
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
        report = build_report(options.runs, options.out, options.every_mini_batch)
    except OSError as error:
        print(f"error: --out {options.out}: {error}", file=sys.stderr)
        return 2
    except NothingReadError as error:
        print(f"{error}\nerror: no run could be read, and nothing is written", file=sys.stderr)
        return 2
    print(*report.problems, sep="\n", end="\n" * bool(report.problems), file=sys.stderr)
    print(f"{report.runs} run{'s' * (report.runs != 1)}: {report.page}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends as other programs do where the reader has gone, as head does
    sys.exit(main())
