"""`python -m recipe.math.data prepare`: data sets as Parquet files in verl's schema, each with a manifest."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fspo.files import folder_problem, write_json
from recipe.math.data.decontaminate import distinct, without_overlap
from recipe.math.data.rows import check_replaceable, write_rows
from recipe.math.data.sources import GROUPS, SOURCES, TEST_SETS, Problem, Source, local_files, read_problems

#: Qwen's request for a box.
REQUEST: Final = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
#: A problem's own request for a box, in other words.
_BOX_ASKED: Final = re.compile(r"\\boxed\s*(?:\{(?:[\s.…]*|[a-z ]*answer[a-z ]*)\}|(?![{\s\w]))")


def prepare(source: Source, out: Path, folder: Path | None = None, against: Sequence[str] = ()) -> dict[str, Any]:
    """Write `out/NAME.parquet` and `out/NAME.manifest.json`; return the manifest.

    Args:
        source: one of `sources.SOURCES`, or of anybody's file.
        folder: local copies (see `sources.local_files`); None loads from the Hugging Face hub.
        against: test sets whose problems are removed if it is a training set.

    Raises:
        ValueError: the source, or one of `against`, is missing or not in its schema; no problem is left.
        OSError: `out` cannot be written to, or holds rows of that name that this program has not written.
    """
    data, description = out / f"{source.name}.parquet", out / f"{source.name}.manifest.json"
    if wrong := folder_problem(out):
        raise NotADirectoryError(f"{out}: {wrong}")
    check_replaceable(data)
    unique, counts = distinct(
        problem._replace(text=problem.text.removesuffix(REQUEST).strip())  # which this has put there before
        for problem in read_problems(source, folder)
    )
    others = [SOURCES[other] for other in against if source.role == "train"]
    tests = {other.name: distinct(read_problems(other, folder))[0] for other in others}
    problems, overlaps = without_overlap(unique, tests)
    counts |= {"dropped_for_overlap": len(unique) - len(problems), "written": len(problems)}
    if not problems:
        raise ValueError(f"no problem is left ({source.prompt!r}, {source.answer!r}): {counts}")
    # Removed first: after a failure, no manifest is better than the manifest of an older file.
    description.unlink(missing_ok=True)
    write_rows([_row(source, index, problem) for index, problem in enumerate(problems)], data)
    manifest = {
        "name": source.name,
        "role": source.role,
        "rows": len(problems),
        "sha256": _sha256(data),
        "source": {
            "hub_id": source.hub_id,
            "split": source.split,
            "revision": source.revision,
            "columns": [source.prompt, source.answer],
            "files": [{"name": path.name, "sha256": _sha256(path)} for path in local_files(source, folder)],
        },
        "counts": counts,
        "overlap_with_tests": overlaps,
    }
    write_json(description, manifest)
    return manifest


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _row(source: Source, index: int, problem: Problem) -> dict[str, Any]:
    """A problem in verl's schema, with one request for a box: its own, or Qwen's."""
    content = problem.text if _BOX_ASKED.search(problem.text) else problem.text + REQUEST
    return {
        "data_source": source.name,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": source.role, "problem_id": f"{source.name}/{index}"},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0; 1 if a set is left out, with why; 2 after a wrong command."""
    parser = argparse.ArgumentParser(prog="python -m recipe.math.data", description=__doc__)
    add = parser.add_argument
    add("command", choices=("prepare",))
    published = ", ".join((*SOURCES, *GROUPS))
    add("names", nargs="+", metavar="NAME", help=f"of {published}; or a file of yours, with --prompt and --answer")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for NAME.parquet and NAME.manifest.json")
    add("--prompt", metavar="COLUMN", help="of your file: the column of problems; COLUMN.FIELD inside")
    add("--answer", metavar="COLUMN", help="the column of answers: alone, in a last box, or behind a last ####")
    add("--name", help="of your file: the data_source of its rows (default: the file's name)")
    add("--role", choices=("train", "test"), default="train", help="of your file (default: train)")
    add("--source", type=Path, metavar="DIR", help="read the copy of the repository in DIR/NAME/, not the hub")
    tests = "test sets to keep out of training sets (default: a published set's own, none for yours; empty: none)"
    add("--against", nargs="*", choices=TEST_SETS, metavar="NAME", help=tests)
    args, failed = parser.parse_args(argv), False
    if args.prompt and args.answer and len(args.names) == 1:
        path = Path(args.names[0])
        name = args.name or path.name.partition(".")[0]
        if not re.fullmatch(r"[\w.-]+", name) or name in SOURCES:
            parser.error(f"{path}: {name!r} is a published set's name or no file's name: give another by --name")
        sources = [Source(name, args.role, args.prompt, args.answer, path=path)]
    else:
        names = list(dict.fromkeys(name for group in args.names for name in GROUPS.get(group, (group,))))
        if args.prompt or args.answer or not SOURCES.keys() >= set(names):
            parser.error(f"{' '.join(names)}: give published sets, or one file with both of --prompt and --answer")
        sources = [SOURCES[name] for name in names]
    for source in sources:
        try:
            against = source.tests if args.against is None else args.against
            manifest = prepare(source, args.out, args.source, against)
            print(f"{source.name}: {manifest['counts']}, overlap {manifest['overlap_with_tests']}", flush=True)
        except (ValueError, OSError) as error:  # the other sets may still be whole
            print(f"error: {source.name}: {error}", file=sys.stderr)
            failed = True
    return int(failed)
