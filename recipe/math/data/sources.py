"""Data sets of problems and answers: where they are, what their rows look like, and how to read them.

A set is a row of a table (:class:`Source`): published ones stand in :data:`SOURCES`, and :func:`own_source` makes one
of anybody's two columns. Schemas and revisions of the published ones were taken from the data sets' pages. Every row is
checked. If a schema has changed, reading stops and names the file, the row and the column, instead of making prompts of
wrong data.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fspo.row_files import SUFFIXES, no_rows_in
from recipe.math.answers.extraction import closing_brace
from recipe.math.answers.truths import no_answer, words_of

_NAMED: Final = 5  # rows that a sentence names
_MOST_WORDS: Final = 10  # of an answer

Row = Any
"""A record, or a list of them."""


class SourceError(ValueError):
    """A source file that is missing, unreadable, or not in its published schema."""


@dataclass(frozen=True)
class Problem:
    """One problem of a data set: its text, its answer (LaTeX, no box) and its identifier in the source.

    A row of anybody's own may lack the text or the answer, which is then empty.
    """

    text: str
    answer: str
    source_id: str


@dataclass(frozen=True)
class Source:
    """A data set: where it is, and in which columns.

    Attributes:
        name: what this project calls it; the `data_source` of its rows.
        role: whether it trains or tests.
        prompt, answer, identifier: the column of each, as `reward_model.ground_truth` inside of another or as `0.value`
            inside of a list. A prompt is text, or a list of messages, of which the last one of a user counts.
        form: how the answer is written: `plain`, as it is; `box`, in the last box of a solution; `hashes`, as GSM8K's
            number behind `####`; `any`, as the last of these that there is.
        around: the instructions before and after the published prompt.
        hub_id, split, revision: where it is on the Hugging Face hub, pinned to a commit; empty for files.
        subset: the folder of the repository that is read, where it has several.
        tests: the test sets whose problems are kept out of it, unless others are named.
        path: the file or folder of a set that is not published.
    """

    name: str
    role: Literal["train", "test"]
    prompt: str
    answer: str
    identifier: str = ""
    form: Literal["plain", "box", "hashes", "any"] = "plain"
    around: tuple[str, str] = ("", "")
    hub_id: str = ""
    split: str = ""
    subset: str | None = None
    tests: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def revision(self) -> str:
        return _REVISIONS.get(self.hub_id, "")

    @property
    def folder(self) -> str:
        """Where a copy of the hub repository has its files: NAME, or of several subsets REPOSITORY/SUBSET."""
        return self.name if self.subset is None else f"{Path(self.hub_id).name}/{self.subset}"

    @property
    def expected(self) -> str:
        """What a row has to look like, for a message."""
        return f"expected a row as in {self.hub_id} at {self.revision}" if self.hub_id else "correct the row"

    @property
    def again(self) -> str:
        """Where a broken file comes from, for a message."""
        return f"copy it again from {self.hub_id}" if self.hub_id else "copy it again, or write it again"

    def problem(self, row: Row) -> Problem:
        """The problem of a row. Raises ValueError or LookupError for a value that is not as it should be."""
        values = _value(row, self.prompt), _value(row, self.answer)
        if self.path is not None and any(value is None or not str(value).strip() for value in values):
            return Problem("", "", "")
        text = _prompt_text(values[0], self.prompt)
        before, after = self.around
        inside = text[len(before) : len(text) - len(after)]
        if text != before + inside + after or not inside.strip():
            raise ValueError(f"column {self.prompt!r} must be a problem between the published instructions")
        identifier = _value(row, self.identifier) if self.identifier else ""
        return Problem(inside.strip(), _answer(values[1], self.answer, self.form), str(identifier))


def _value(row: Row, column: str) -> Any:
    """The value of a column, or of `column.field` inside of it; None if there is none."""
    if isinstance(row, Mapping) and column in row:  # a name may have a dot
        return row[column]
    first, dot, rest = column.partition(".")
    if isinstance(row, list):
        inner = row[int(first)] if first.isdecimal() and int(first) < len(row) else None
    else:
        inner = row.get(first) if isinstance(row, Mapping) else None
    return _value(inner, rest) if dot else inner


def _prompt_text(value: Any, column: str) -> str:
    """A prompt that is text, or the only message before the answer of an assistant (ShareGPT: from, value)."""
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        roles = [message.get("role", message.get("from")) for message in value]
        if roles not in ([role, *rest] for role in ("user", "human") for rest in ([], ["assistant"], ["gpt"])):
            raise ValueError(f"column {column!r} must be text or one message of a user, found messages of {roles}")
        value = value[0].get("content", value[0].get("value"))
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {column!r} must be text, found {value!r:.40}")
    return value.strip()


def _answer(value: Any, column: str, form: str) -> str:
    """An answer given as text or number; whole numbers lose their decimals (amc23 has "27.0")."""
    if form == "any" and isinstance(value, list) and len(value) == 1:
        value = value[0]
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    if not text:
        raise ValueError(f"column {column!r} must be text or a number, found {value!r:.40}")
    if form == "any":
        form = next((name for name, written in _FORMS.items() if written.search(text)), "plain")
    if form == "hashes":
        if not (numbers := re.findall(r"####[ \t]*(-?[0-9.,]+)", text)):
            raise ValueError(f"column {column!r} must have #### and a number, found {text[-40:]!r}")
        return str(numbers[-1]).rstrip(".,").replace(",", "")
    if form == "box":
        return _last_box(text, column)
    whole, point, decimals = text.partition(".")
    return whole if point and not decimals.strip("0") and whole.removeprefix("-").isdecimal() else text


#: By what an answer of anybody's is known to be written so; before the last line #### is a heading's.
_FORMS: Final = {
    "hashes": re.compile(r"####[ \t]*-?[0-9.,]*[0-9][.,]?\s*\Z"),
    "box": re.compile(r"\\boxed[ {]|\\fbox\{"),
}


def _last_box(solution: str, column: str) -> str:
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if start < 0:
        # One published form has no braces: "\boxed 2" is followed by a single token.
        answer = solution.rpartition("\\boxed ")[2].split("$")[0].strip(" .") if "\\boxed " in solution else ""
    else:
        opening = solution.index("{", start)
        answer = solution[opening + 1 : closing_brace(solution, opening) or opening].strip()
    if not answer:
        raise ValueError(f"column {column!r} must have a closed \\boxed{{...}} with an answer")
    return answer


DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'

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
_DAPO: Final = ("prompt", "reward_model.ground_truth", "extra_info.index", "plain", (DAPO_OPENING, DAPO_CLOSING))
_MATH: Final = ("problem", "solution", "", "box")
_GSM8K: Final = ("question", "answer", "", "hashes")
_NONE: Final = ("", "")
SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("dapo_math_17k", "train", *_DAPO, "BytedTsinghua-SIA/DAPO-Math-17k", "train", tests=_PAPER),
        Source("math_train", "train", *_MATH, _NONE, "DigitalLearningGmbH/MATH-lighteval", "train", tests=_PAPER),
        Source("math500", "test", "problem", "answer", "unique_id", "plain", _NONE, "HuggingFaceH4/MATH-500", "test"),
        Source("amc23", "test", "question", "answer", "id", "plain", _NONE, "math-ai/amc23", "test"),
        Source("aime24", "test", "problem", "answer", "id", "plain", _NONE, "HuggingFaceH4/aime_2024", "train"),
        Source("aime25", "test", "problem", "answer", "id", "plain", _NONE, "math-ai/aime25", "test"),
        Source("gsm8k_train", "train", *_GSM8K, _NONE, "openai/gsm8k", "train", "main", ("gsm8k_test",)),
        Source("gsm8k_test", "test", *_GSM8K, _NONE, "openai/gsm8k", "test", "main"),
    )
}
TEST_SETS = tuple(source.name for source in SOURCES.values() if source.role == "test")
GROUPS: Final = {"gsm8k": ("gsm8k_train", "gsm8k_test"), "all": tuple(SOURCES)}


def own_source(path: Path, name: str, role: Literal["train", "test"], prompt: str, answer: str) -> Source:
    """Anybody's file, or folder of files, with a column of problems and one of answers."""
    return Source(name, role, prompt, answer, form="any", path=path)


def read_problems(source: Source, folder: Path | None) -> Iterator[Problem]:
    """Problems of a source in order: of its own file, the copies under `folder`, or the Hugging Face hub.

    Raises:
        SourceError: a file that is missing, cannot be read or has no rows, a row that is not as it should be, or rows
            of anybody's whose answer is none; the message names the file and the row.
    """
    for path in [None] if folder is None and source.path is None else local_files(source, folder):
        place, number = str(path or f"{source.hub_id} at {source.revision}"), 0
        unfit: list[str] = []
        rows = _hub_rows(source) if path is None else _rows(source, path)
        for number, row in enumerate(rows, start=1):
            try:
                problem = source.problem(row)
                (problem.text + problem.answer + problem.source_id).encode()  # half a character fits into no file
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                raise SourceError(f"{place}, row {number}: {why}; {source.expected}") from error
            if source.path is not None and (what := _no_answer(problem.answer)):
                unfit.append(f"row {number} ({what})")
            else:
                yield problem
        if unfit:
            more = f" and {len(unfit) - _NAMED} more" if len(unfit) > _NAMED else ""
            raise SourceError(
                f"{place}: column {source.answer!r} has no answer, alone, in a box or behind ####, in "
                f"{', '.join(unfit[:_NAMED])}{more}; correct these rows, or leave them out"
            )
        if number == 0:
            raise SourceError(f"{place}: has no rows; {source.again}")


def _no_answer(answer: str) -> str:
    """What an answer of anybody's is that is none: code, a record, markup, or the words of a solution or a proof."""
    words = words_of(answer)
    return no_answer(answer) or (f"{words} words" if words > _MOST_WORDS else "")


def columns_of(source: Source) -> list[str]:
    """The columns of the first row of anybody's file."""
    assert source.path is not None
    rows = (row for path in local_files(source, None) for row in _rows(source, path))
    row: Row = next(rows, {})
    return [str(column) for column in (row if isinstance(row, Mapping) else range(len(row)))]


def local_files(source: Source, folder: Path | None) -> list[Path]:
    """Data files of a source: its own, or under `folder` `NAME.*`, or else all in its own folder.

    Of several, those named after the split. Its own folder may be that of a copy of the hub repository. Raises
    SourceError if there is no file.
    """
    if source.path is not None:
        return _own_files(source.path)
    assert folder is not None
    named = [path for suffix in SUFFIXES if (path := folder / f"{source.name}{suffix}").is_file()]
    files = named or sorted(path for path in (folder / source.folder).rglob("*") if path.suffix in SUFFIXES)
    if not files:
        raise SourceError(
            f"{folder}: no {source.name}.parquet, .jsonl or .json and no such file in a folder {source.folder}/; "
            f"put a copy of {source.hub_id} (revision {source.revision}) there"
        )
    of_split = [path for path in files if _split_of(path) == source.split]
    return of_split if of_split and len(files) > 1 else files


def _own_files(path: Path) -> list[Path]:
    """The file, or the files of a folder if all of them are of one split."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files or (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        raise SourceError(f"{path} {no_rows_in(path)}")
    of_split: dict[str, list[Path]] = {}
    for file in files:
        of_split.setdefault(_split_of(file), []).append(file)
    if len(of_split) > 1:
        firsts = ", ".join(str(files[0]) for files in of_split.values())
        raise SourceError(f"{path} has files of several splits, such as {firsts}: give one file, or a folder of one")
    return files


def _split_of(file: Path) -> str:
    """The split that a file's name has as a word: train, test, val or dev; empty without one."""
    split = re.search(r"(?<![a-z])(train|test|val|dev)(?:ing|id|idation|s|set)?(?![a-z])", file.stem.lower())
    return split[1] if split else ""


def _hub_rows(source: Source) -> Iterator[Row]:
    from datasets import load_dataset

    try:  # or from the local cache of datasets
        yield from load_dataset(source.hub_id, source.subset, split=source.split, revision=source.revision)
    except Exception as error:
        raise SourceError(
            f"{source.hub_id} at {source.revision} cannot be loaded ({type(error).__name__}: {error}); "
            f"without network, copy it to DIR/{source.folder}/ and give --source DIR"
        ) from error


_TABLES: Final = {".csv": ",", ".tsv": "\t"}


def _rows(source: Source, path: Path) -> Iterator[Row]:
    """Rows of a Parquet, JSON lines, JSON or CSV file; a JSON file is a list of rows, or has one a line.

    ``datasets`` takes six times as long, and its errors name no line.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = str(path)
    if what := no_rows_in(path, (*SUFFIXES, *_TABLES) if source.path else SUFFIXES):
        raise SourceError(f"{path} {what}" if source.path else f"{path} {what}; {source.again}")
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=4096):  # DAPO-Math-17k has 1.8 million rows
                    yield from batch.to_pylist()
        elif path.suffix in _TABLES:
            with path.open(encoding="utf-8-sig", newline="") as table:
                yield from csv.DictReader(table, delimiter=_TABLES[path.suffix])
        elif path.suffix == ".json" and path.read_bytes().lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            yield from json.loads(path.read_text(encoding="utf-8-sig"))
        else:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    place = f"{path}, line {number}"
                    if line.strip():
                        yield json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (pa.ArrowException, OSError, ValueError, csv.Error) as error:
        raise SourceError(f"{place}: cannot be read ({error}); {source.again}") from error
