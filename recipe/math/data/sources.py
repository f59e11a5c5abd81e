"""The published data sets of the paper's setting: where they are, what their rows look like, and how to read them.

Schemas and revisions were taken from the data sets' pages. Every row is checked. If the schema has changed, reading
stops and names the file, the row and the column, instead of making prompts of wrong data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from recipe.math.answers.extraction import closing_brace

Row = Mapping[str, Any]


class SourceError(ValueError):
    """A source file that is missing, unreadable, or not in its published schema."""


@dataclass(frozen=True)
class Problem:
    """One problem of a data set: its text, its answer (LaTeX, no box) and its identifier in the source."""

    text: str
    answer: str
    source_id: str


@dataclass(frozen=True)
class Source:
    """A published data set.

    Attributes:
        name: what this project calls it; the `data_source` of its rows.
        role: whether it trains or tests.
        hub_id, split, revision: where it is on the Hugging Face hub, pinned to a commit.
        read: makes a problem of a row; raises an exception for a value that is not as published.
        subset: the folder of the repository that is read, where it has several.
        tests: the test sets whose problems are kept out of it, unless others are named.
    """

    name: str
    role: Literal["train", "test"]
    hub_id: str
    split: str
    read: Callable[[Row], Problem]
    subset: str | None = None
    tests: tuple[str, ...] = ()

    @property
    def revision(self) -> str:
        return _REVISIONS[self.hub_id]

    @property
    def folder(self) -> str:
        """Where a copy of the hub repository has its files: NAME, or of several subsets REPOSITORY/SUBSET."""
        return self.name if self.subset is None else f"{Path(self.hub_id).name}/{self.subset}"


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {column!r} must be text, found {value!r:.40}")
    return value.strip()


def _answer(row: Row, column: str) -> str:
    """An answer given as text or number; whole numbers lose their decimals (amc23 has "27.0")."""
    value = row.get(column)
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    if not text:
        raise ValueError(f"column {column!r} must be text or a number, found {value!r:.40}")
    whole, point, decimals = text.partition(".")
    return whole if point and not decimals.strip("0") and whole.removeprefix("-").isdecimal() else text


DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'


def _read_dapo(row: Row) -> Problem:
    (message,) = row["prompt"]
    content = message["content"]
    text = content[len(DAPO_OPENING) : -len(DAPO_CLOSING)]
    if content != DAPO_OPENING + text + DAPO_CLOSING or not text.strip():
        raise ValueError("column 'prompt' must be a problem between the published instructions")
    return Problem(text.strip(), _answer(row["reward_model"], "ground_truth"), _text(row["extra_info"], "index"))


def _read_math(row: Row) -> Problem:
    solution = _text(row, "solution")
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if start < 0:
        # One published form has no braces: "\boxed 2" is followed by a single token.
        answer = solution.rpartition("\\boxed ")[2].split("$")[0].strip(" .") if "\\boxed " in solution else ""
    else:
        opening = solution.index("{", start)
        answer = solution[opening + 1 : closing_brace(solution, opening) or opening].strip()
    if not answer:
        raise ValueError("column 'solution' must have a closed \\boxed{...} with an answer")
    return Problem(_text(row, "problem"), answer, "")


def _read_gsm8k(row: Row) -> Problem:
    published = _text(row, "answer")
    answer = re.search(r"#### (-?[0-9.,]+)", published)
    if answer is None:
        raise ValueError(f"column 'answer' must have #### and a number, found {published[-40:]!r}")
    return Problem(_text(row, "question"), answer[1].replace(",", ""), "")


def _plain(problem: str, answer: str, identifier: str) -> Callable[[Row], Problem]:
    def read(row: Row) -> Problem:
        return Problem(_text(row, problem), _answer(row, answer), str(row[identifier]))

    return read


_PAPER: Final = ("math500", "amc23", "aime24", "aime25")
#: Commit of each repository on the hub.
_REVISIONS: Final = {
    "BytedTsinghua-SIA/DAPO-Math-17k": "65877096c24ffa7abc4e4fa5edb95cf3413a5674",
    "DigitalLearningGmbH/MATH-lighteval": "0530c78699ea5e8eb5530600900e1f328b48acad",
    "HuggingFaceH4/MATH-500": "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    "math-ai/amc23": "80815d37005feb82cd7f8fbc6901d5d3eff43057",
    "HuggingFaceH4/aime_2024": "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    "math-ai/aime25": "563bb8404243c5f09de6ec262f2db674fe5bce9b",
    "openai/gsm8k": "740312add88f781978c0658806c59bc2815b9866",
}
SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("dapo_math_17k", "train", "BytedTsinghua-SIA/DAPO-Math-17k", "train", _read_dapo, tests=_PAPER),
        Source("math_train", "train", "DigitalLearningGmbH/MATH-lighteval", "train", _read_math, tests=_PAPER),
        Source("math500", "test", "HuggingFaceH4/MATH-500", "test", _plain("problem", "answer", "unique_id")),
        Source("amc23", "test", "math-ai/amc23", "test", _plain("question", "answer", "id")),
        Source("aime24", "test", "HuggingFaceH4/aime_2024", "train", _plain("problem", "answer", "id")),
        Source("aime25", "test", "math-ai/aime25", "test", _plain("problem", "answer", "id")),
        Source("gsm8k_train", "train", "openai/gsm8k", "train", _read_gsm8k, "main", ("gsm8k_test",)),
        Source("gsm8k_test", "test", "openai/gsm8k", "test", _read_gsm8k, "main"),
    )
}
TEST_SETS = tuple(source.name for source in SOURCES.values() if source.role == "test")
GROUPS: Final = {"gsm8k": ("gsm8k_train", "gsm8k_test"), "all": tuple(SOURCES)}


def read_problems(source: Source, folder: Path | None) -> Iterator[Problem]:
    """Problems of a source in order: of the copies under `folder`, or from the Hugging Face hub at the pinned revision.

    Raises:
        SourceError: a file that is missing, cannot be read or has no rows, or a row that is not as published; the
            message names the file and the row.
    """
    for path in [None] if folder is None else local_files(source, folder):
        place, number = str(path or f"{source.hub_id} at {source.revision}"), 0
        rows = _hub_rows(source) if path is None else _rows(source, path)
        for number, row in enumerate(rows, start=1):
            try:
                problem = source.read(row)
                (problem.text + problem.answer + problem.source_id).encode()  # half a character fits into no file
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                raise SourceError(
                    f"{place}, row {number}: {why}; expected a row as in {source.hub_id} at {source.revision}"
                ) from error
            yield problem
        if number == 0:
            raise SourceError(f"{place}: has no rows; copy the file again from {source.hub_id}")


def local_files(source: Source, folder: Path) -> list[Path]:
    """Data files of a source under `folder`: `NAME.*`, or else all in its own; of several, those named after the split.

    Its own folder may be that of a copy of the hub repository. Raises SourceError if there is no file.
    """
    suffixes = (".parquet", ".jsonl", ".json")
    named = [path for suffix in suffixes if (path := folder / f"{source.name}{suffix}").is_file()]
    files = named or sorted(path for path in (folder / source.folder).rglob("*") if path.suffix in suffixes)
    if not files:
        raise SourceError(
            f"{folder}: no {source.name}.parquet, .jsonl or .json and no such file in a folder {source.folder}/; "
            f"put a copy of {source.hub_id} (revision {source.revision}) there"
        )
    of_split = [path for path in files if source.split in path.stem]
    return of_split if of_split and len(files) > 1 else files


def _hub_rows(source: Source) -> Iterator[Row]:
    from datasets import load_dataset

    try:  # or from the local cache of datasets
        yield from load_dataset(source.hub_id, source.subset, split=source.split, revision=source.revision)
    except Exception as error:
        raise SourceError(
            f"{source.hub_id} at {source.revision} cannot be loaded ({type(error).__name__}: {error}); "
            f"without network, copy it to DIR/{source.folder}/ and give --source DIR"
        ) from error


def _rows(source: Source, path: Path) -> Iterator[Row]:
    """Rows of a Parquet, JSON lines or JSON file. ``datasets`` takes six times as long, and its errors name no line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = str(path)
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=4096):  # DAPO-Math-17k has 1.8 million rows
                    yield from batch.to_pylist()
        elif path.suffix == ".json":
            yield from json.loads(path.read_bytes())
        else:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    place = f"{path}, line {number}"
                    if line.strip():
                        yield json.loads(line)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(f"{place}: cannot be read ({error}); copy it again from {source.hub_id}") from error
