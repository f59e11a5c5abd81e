"""Command line of `python -m recipe.math.data`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.math.data.prepare import describe, prepare
from recipe.math.data.sources import GROUPS, SOURCES, TEST_SETS


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.math.data", description="Data sets for training and evaluation."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "prepare",
        help="write published data sets as Parquet files in verl's schema, each with a manifest",
        description=(
            "Write OUT/NAME.parquet and OUT/NAME.manifest.json for each NAME. Duplicates are removed, and problems of "
            "the test sets are removed from training sets."
        ),
    )
    names = [*SOURCES, *GROUPS]
    command.add_argument("names", nargs="+", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    command.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="read local copies, DIR/NAME.parquet (.jsonl, .json) or DIR/NAME/, instead of the Hugging Face hub",
    )
    command.add_argument(
        "--against",
        nargs="*",
        choices=TEST_SETS,
        metavar="NAME",
        help="test sets to keep out of training sets (default: those of the set; without names: none)",
    )
    command.set_defaults(run=_prepare)
    return parser


def _prepare(args: argparse.Namespace) -> int:
    failed = False
    for name in dict.fromkeys(name for group in args.names for name in GROUPS.get(group, (group,))):
        against = SOURCES[name].tests if args.against is None else args.against
        try:
            print(describe(prepare(name, args.out, args.source, against)), flush=True)
        except (ValueError, OSError) as error:  # the other sets may still be whole
            print(f"error: {name}: {str(error).removeprefix(f'{name}: ')}", file=sys.stderr)
            failed = True
    return int(failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Exit status: 0; 1 if `prepare` leaves a set out; 2 after a user's error.
    """
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
