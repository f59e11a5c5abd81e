"""``python -m fspo.audit FOLDER``: tables by length, and what follows from them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from fspo.audit.description import describe
from fspo.audit.reading import read_audit, read_responses
from fspo.conclusion import ACCEPT, Override
from fspo.files import piped


def installed_override() -> Override | None:
    """The function of the first entry point ``fspo.overrides``; None if no installed package has one."""
    return next((point.load() for point in entry_points(group="fspo.overrides")), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m fspo.audit FOLDER``; status 1 if something is missing, 2 if there is no audit to read."""
    parser = argparse.ArgumentParser(prog="python -m fspo.audit", description="Tables by length, and what follows.")
    parser.add_argument("folder", type=Path, help="what FSPO_AUDIT named, a run folder, or a parquet file of S and L")
    parser.add_argument("--run", default="", help="one of several starts in the folder; the newest by default")
    parser.add_argument(
        "--accept", type=float, default=ACCEPT, help="share that is to lie inside (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    if not 0 < chosen.accept < 1:
        parser.error(f"--accept {chosen.accept:g}: must lie between 0 and 1, such as 0.85")
    if chosen.folder.suffix == ".parquet":
        try:
            table, responses = read_responses(chosen.folder)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(describe(table, chosen.accept, responses, installed_override()))
        return 0
    records = read_audit(chosen.folder, chosen.run)
    if records.others:
        print(f"note: run {records.run}; --run reads another one: {', '.join(records.others)}", file=sys.stderr)
    for problem in records.problems:
        print(f"{'warning' if records.run else 'error'}: {problem}", file=sys.stderr)
    if records.sums:
        print(describe(records, chosen.accept, override=installed_override()))
    if not records.run:
        return 2
    return 1 if records.problems else 0


if __name__ == "__main__":
    sys.exit(piped(main))
