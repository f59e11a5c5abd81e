"""`python -m recipe.math.data prepare`: data sets as Parquet files in verl's schema, each with a manifest."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fspo.files import write_json
from recipe.math.data.decontaminate import distinct, without_overlap
from recipe.math.data.rows import check_replaceable, write_rows
from recipe.math.data.sources import GROUPS, SOURCES, TEST_SETS, Problem, Source, local_files, own_source, read_problems

#: Qwen's request for a box.
REQUEST: Final = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
#: A problem's own request for a box, in other words.
_BOX_ASKED: Final = re.compile(r"\\boxed\s*(?:\{(?:[\s.…]*|[a-z ]*answer[a-z ]*)\}|(?![{\s\w]))")


def prepare(source: Source, out: Path, folder: Path | None = None, against: Sequence[str] = ()) -> dict[str, Any]:
    """Write `out/NAME.parquet` and `out/NAME.manifest.json`; return the manifest.

    Args:
        source: one of `sources.SOURCES`, or of `sources.own_source`.
        folder: local copies (see `sources.local_files`); None loads from the Hugging Face hub.
        against: test sets whose problems are removed if it is a training set.

    Raises:
        SourceError: the source, or one of `against`, is missing or not in its schema.
        ValueError: no problem is left, or the file to write is one that is read.
        OSError: `out` cannot be written to, or holds rows of that name that this program has not written.
    """
    name = source.name
    data, description = out / f"{name}.parquet", out / f"{name}.manifest.json"
    files = local_files(source, folder)
    if data.resolve() in (path.resolve() for path in files):
        raise ValueError(f"{data} would be written over while it is read: give another --out or --name")
    out.mkdir(parents=True, exist_ok=True)
    check_replaceable(data)
    unique = distinct(
        replace(problem, text=problem.text.removesuffix(REQUEST).strip())  # which this has put there before
        for problem in read_problems(source, folder)
    )
    others = [SOURCES[other] for other in against if source.role == "train"]
    tests = {other.name: distinct(read_problems(other, folder)).problems for other in others}
    problems, overlaps = without_overlap(unique.problems, tests)
    rows = [_row(source, index, problem) for index, problem in enumerate(problems)]
    if not rows:
        raise ValueError(
            f"no problem is left of {unique.read} rows: {unique.empty} are without {source.prompt!r} or "
            f"{source.answer!r}, the others overlap with test sets"
        )
    manifest = {
        "name": name,
        "role": source.role,
        "rows": len(rows),
        "source": {
            "hub_id": source.hub_id,
            "split": source.split,
            "revision": source.revision,
            "columns": [source.prompt, source.answer],
            "files": [{"name": path.name, "sha256": _sha256(path)} for path in files],
        },
        "counts": {
            "read": unique.read,
            "without_answer": unique.empty,
            "duplicates": unique.duplicates,
            "overlap_with_tests": overlaps,
            "dropped_for_overlap": len(unique.problems) - len(problems),
            "written": len(rows),
        },
        "prompt_template": "{problem}" + REQUEST,
    }
    # Removed first: after a failure, no manifest is better than the manifest of an older file.
    description.unlink(missing_ok=True)
    write_rows(rows, data)
    manifest |= {"file": data.name, "bytes": data.stat().st_size, "sha256": _sha256(data)}
    write_json(description, manifest)
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _row(source: Source, index: int, problem: Problem) -> dict[str, Any]:
    """A problem in verl's schema, with one request for a box: its own, or Qwen's."""
    content = problem.text if _BOX_ASKED.search(problem.text) else problem.text + REQUEST
    identity = f"{source.name}/{index}"
    return {
        "data_source": source.name,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": source.role, "problem_id": identity, "source_id": problem.source_id},
    }


def describe(manifest: Mapping[str, Any]) -> str:
    """What was kept and left out, in one line."""
    counts = manifest["counts"]
    by_set = ", ".join(f"{name} {sum(found.values())}" for name, found in counts["overlap_with_tests"].items())
    return (
        f"{manifest['name']}: {counts['read']} rows read, {counts['without_answer']} without a problem or an answer, "
        f"{counts['duplicates']} duplicates, {counts['dropped_for_overlap']} overlapping with tests "
        f"({by_set or 'not compared'}), {counts['written']} written"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipe.math.data", description="Data sets for training and tests.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("prepare", help=__doc__, description=__doc__).add_argument
    names = ", ".join((*SOURCES, *GROUPS))
    add("names", nargs="+", metavar="NAME", help=f"of {names}; or your files, with --prompt and --answer")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for NAME.parquet and NAME.manifest.json")
    add("--prompt", metavar="COLUMN", help="of your file: the column of problems; COLUMN.FIELD inside")
    add("--answer", metavar="COLUMN", help="the column of answers: alone, in a last box, or behind a last ####")
    add("--name", help="of your file: the data_source of its rows (default: the file's name)")
    add("--role", choices=("train", "test"), default="train", help="of your file (default: train)")
    add("--source", type=Path, metavar="DIR", help="read the copy of the repository in DIR/NAME/, not the hub")
    against = "test sets to keep out of training sets (default: a published set's own, none for yours; empty: none)"
    add("--against", nargs="*", choices=TEST_SETS, metavar="NAME", help=against)
    return parser


def _sources(args: argparse.Namespace) -> Iterator[Source]:
    """The sets that a command line names. Raises ValueError, with what to give, for a name that is none."""
    if (args.prompt is None) != (args.answer is None) or (args.name and len(args.names) > 1):
        raise ValueError("--prompt and --answer belong together, and --name to one file")
    if args.prompt is None:
        for name in dict.fromkeys(name for group in args.names for name in GROUPS.get(group, (group,))):
            if name not in SOURCES:
                raise ValueError(f"{name!r} is no published set; a file of yours needs --prompt and --answer")
            yield SOURCES[name]
        return
    written: set[str] = set()
    for path in map(Path, args.names):
        name = args.name or path.resolve().name.partition(".")[0]
        if not re.fullmatch(r"[\w.-]+", name) or name in SOURCES or name in written:
            raise ValueError(f"{path}: {name!r} is another set's name or none: give one by --name")
        written.add(name)
        yield own_source(path, name, args.role, args.prompt, args.answer)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0; 1 if a set is left out, with why; 2 after a wrong command."""
    args, failed = _parser().parse_args(argv), False
    try:
        sources = list(_sources(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for source in sources:
        try:
            against = source.tests if args.against is None else args.against
            print(describe(prepare(source, args.out, args.source, against)), flush=True)
        except (ValueError, OSError) as error:  # the other sets may still be whole
            print(f"error: {source.name}: {error}", file=sys.stderr)
            failed = True
    return int(failed)
