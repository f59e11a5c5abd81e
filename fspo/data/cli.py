"""Command line of `python -m fspo.data`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fspo.data.prepare import describe, prepare
from fspo.data.sources import GROUPS, SOURCES, TEST_SETS


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m fspo.data", description="Data sets for training and evaluation.")
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
    command = commands.add_parser(
        "check",
        help="look at every row of data files as a run would use them",
        description=(
            "Columns, types, empty and repeated prompts, prompt lengths, a sample of each data source. Exit status 1, "
            "with the reasons, if training would stop at these files or would leave rows out."
        ),
    )
    command.add_argument("files", nargs="+", metavar="FILE", help="the files of a run, in verl's schema")
    command.add_argument("--model", help="folder or hub name: lengths in tokens, and the chat template applied")
    command.add_argument("--max-prompt-length", type=int, metavar="N", help="data.max_prompt_length of the run")
    command.add_argument(
        "--reward", metavar="FILE[:FUNCTION]", help="call this reward with the ground truth as response, and with none"
    )
    command.set_defaults(run=_check)
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


def _check(args: argparse.Namespace) -> int:
    from fspo.data.check import check

    if args.max_prompt_length is not None and args.model is None:
        raise ValueError("--max-prompt-length counts tokens: give --model, whose tokenizer counts them")
    report = check(args.files, args.model, args.max_prompt_length, args.reward)
    print("\n".join(report.lines))
    for problem in report.problems:
        print(f"error: {problem}", file=sys.stderr)
    if not report.problems:
        print("\nnothing is wrong with these files")
    return 1 if report.problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Exit status: 0; 1 if `check` finds something or `prepare` leaves a set out; 2 after a user's error.
    """
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
