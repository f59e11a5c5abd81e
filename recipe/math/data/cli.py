"""Command line of `python -m recipe.math.data`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fspo.names import did_you_mean
from recipe.math.data.prepare import describe, prepare
from recipe.math.data.sources import GROUPS, SOURCES, TEST_SETS, Source, own_source

_NAMES: Final = (*SOURCES, *GROUPS)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.math.data", description="Data sets for training and evaluation."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "prepare",
        help="write data sets as Parquet files in verl's schema, each with a manifest",
        description=(
            "Write OUT/NAME.parquet and OUT/NAME.manifest.json for each NAME, or for a file of yours with a column of "
            "problems and one of answers. Duplicates are removed, and problems of the test sets are removed from "
            "training sets: with --against, for a file of yours."
        ),
    )
    command.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help=f"one of {', '.join(_NAMES)}; with --prompt and --answer a file (.parquet, .jsonl, .json, .csv), or a "
        "folder of such files",
    )
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    command.add_argument("--prompt", metavar="COLUMN", help="of your file: the column of problems; COLUMN.FIELD inside")
    command.add_argument(
        "--answer",
        metavar="COLUMN",
        help="of your file: the column of answers, alone, in a solution's last box, or behind a last ####",
    )
    command.add_argument("--name", help="of your file: the data_source of its rows (default: the file's name)")
    command.add_argument(
        "--role", choices=("train", "test"), default="train", help="of your file: training set (default) or test set"
    )
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
        help="test sets to keep out of training sets (default: those of a published set, none for a file of yours; "
        "without names: none)",
    )
    command.set_defaults(run=_prepare)
    return parser


def _sources(args: argparse.Namespace) -> Iterator[Source]:
    """The sets that a command line names. Raises ValueError, with what to give, for a name that is none."""
    if args.prompt is None and args.answer is None:
        for name in dict.fromkeys(name for group in args.names for name in GROUPS.get(group, (group,))):
            if name not in SOURCES:
                raise ValueError(
                    f"{name!r} is no published set{did_you_mean(name, _NAMES)}: choose of {', '.join(_NAMES)}; a file "
                    "of yours needs --prompt COLUMN and --answer COLUMN"
                )
            yield SOURCES[name]
        return
    if args.prompt is None or args.answer is None:
        raise ValueError("--prompt and --answer belong together: give the columns of the problems and of the answers")
    if args.name and len(args.names) > 1:
        raise ValueError(f"--name {args.name} is for one file, and {len(args.names)} are given: prepare each by itself")
    written: dict[str, Path] = {}
    for path in map(Path, args.names):
        name = args.name or path.resolve().name.partition(".")[0]
        if not re.fullmatch(r"[\w.-]+", name) or name in SOURCES:
            raise ValueError(f"--name {name!r}: give a name of letters, digits, _, - and . that no published set has")
        if name in written:
            raise ValueError(
                f"{written[name]} and {path} would both be written as {name}: prepare each by itself, with a --name"
            )
        written[name] = path
        yield own_source(path, name, args.role, args.prompt, args.answer)


def _prepare(args: argparse.Namespace) -> int:
    failed = False
    for source in list(_sources(args)):
        name, against = source.name, source.tests if args.against is None else args.against
        try:
            print(describe(prepare(source, args.out, args.source, against)), flush=True)
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
