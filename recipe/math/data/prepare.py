"""Writes a published data set as a Parquet file in verl's schema, with a manifest of its content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fspo.files import check_folder, check_replaceable, sha256_of, write_json, write_rows
from recipe.math.answers import MathScorer
from recipe.math.data.decontaminate import distinct, without_overlap
from recipe.math.data.sources import SOURCES, Problem, Source, SourceError, columns_of, local_files, read_problems

TEMPLATE = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
"""Qwen's request for a box."""
_REQUEST: Final = TEMPLATE.removeprefix("{problem}")
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
    read = [] if folder is None and source.path is None else local_files(source, folder)
    if data.resolve() in (path.resolve() for path in read):
        raise ValueError(f"{data} would be written over while it is read: give another --out or --name")
    check_folder(out)
    check_replaceable(data)
    problems_read = _without_request(read_problems(source, folder))
    with MathScorer(n_workers=1) as scorer:  # it starts no process before two answers to one problem differ
        unique = distinct(problems_read, lambda one, other: scorer.score(f"\\boxed{{{one}}}", other).score == 1)
    if unique.empty == unique.read:
        columns = ", ".join(columns_of(source)) or "none"
        raise SourceError(
            f"{source.path}: no row has both columns {source.prompt!r} and {source.answer!r}; it has {columns}"
        )
    others = [SOURCES[other] for other in against if source.role == "train"]
    tests = {other.name: distinct(read_problems(other, folder)).problems for other in others}
    problems, overlaps = without_overlap(unique.problems, tests)
    rows: list[dict[str, Any]] = [
        {
            "data_source": name,
            "prompt": [{"role": "user", "content": _prompt(problem.text)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {
                "index": index,
                "split": source.role,
                "problem_id": f"{name}/{index}",
                "source_id": problem.source_id,
            },
        }
        for index, problem in enumerate(problems)
    ]
    if not rows:
        raise ValueError(f"{name}: no problem is left of {unique.read} rows after removing duplicates and overlap")
    manifest = {
        "name": name,
        "role": source.role,
        "rows": len(rows),
        "source": _origin(source, folder),
        "counts": {
            "read": unique.read,
            "duplicates": unique.duplicates,
            "conflicting_answers": unique.conflicting,
            "without_answer": unique.empty,
            "overlap_with_tests": overlaps,
            "dropped_for_overlap": len(unique.problems) - len(problems),
            "written": len(rows),
        },
        "prompt_template": TEMPLATE,
    }
    # Removed first: after a failure, no manifest is better than the manifest of an older file.
    description.unlink(missing_ok=True)
    write_rows(rows, data)
    manifest |= {"file": data.name, "bytes": data.stat().st_size, "sha256": sha256_of(data)}
    write_json(description, manifest)
    return manifest


def _without_request(problems: Iterator[Problem]) -> Iterator[Problem]:
    """Problems without the request that :func:`prepare` has put behind them before."""
    for problem in problems:
        yield replace(problem, text=problem.text.removesuffix(_REQUEST).strip())


def _prompt(problem: str) -> str:
    """A problem with a request for a box, its own if it has one."""
    return problem if _BOX_ASKED.search(problem) else TEMPLATE.replace("{problem}", problem)


def describe(manifest: Mapping[str, Any]) -> str:
    """One line for people: rows and what was removed."""
    counts = manifest["counts"]
    by_set = ", ".join(f"{name} {sum(overlap.values())}" for name, overlap in counts["overlap_with_tests"].items())
    empty = f"{counts['without_answer']} without a problem or an answer, " if counts["without_answer"] else ""
    return (
        f"{manifest['name']}: {counts['read']} rows read, {empty}{counts['duplicates']} duplicates, "
        f"{counts['conflicting_answers']} with conflicting answers, {counts['dropped_for_overlap']} overlapping with "
        f"tests ({by_set or 'not compared'}), {counts['written']} written"
    )


def _origin(source: Source, folder: Path | None) -> dict[str, Any]:
    origin: dict[str, Any] = {"hub_id": source.hub_id, "split": source.split}
    if source.path is not None:
        origin, folder = {"columns": [source.prompt, source.answer]}, source.path.parent
    elif folder is None:
        return origin | {"revision": source.revision}
    else:
        # The revision of a local copy is not known; its checksums identify it.
        origin |= {"revision": None, "expected_revision": source.revision}
    files = [
        {"name": str(path.relative_to(folder)), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in local_files(source, folder)
    ]
    return origin | {"files": files}
