"""Data sets of problems and answers: where they are, what their rows look like, and how to read them.

Published sets stand in :data:`SOURCES`; anybody's file is a :class:`Source` with a path. Every row is checked: a
changed schema stops the reading instead of making prompts of wrong data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from recipe.math.answers.extraction import answer_of


class Problem(NamedTuple):
    """One problem of a data set and its answer (LaTeX, no box); both are empty if a row of anybody's file lacks one."""

    text: str
    answer: str


@dataclass(frozen=True)
class Source:
    """A data set: where it is, and in which columns; `reward_model.ground_truth` is a field of a column.

    A prompt is text, or a list of messages with one of a user, or that as JSON. An answer stands alone, in the last
    box, or behind a last `####`.
    """

    name: str  # the `data_source` of its rows
    role: Literal["train", "test"]
    prompt: str
    answer: str
    hub_id: str = ""  # on the Hugging Face hub
    revision: str = ""  # the commit that is read
    split: str = "train"
    subset: str | None = None  # a folder of the repository
    tests: tuple[str, ...] = ()  # sets whose problems are kept out of it, unless others are named
    around: tuple[str, str] = ("", "")  # the instructions before and after a published prompt
    is_solution: bool = False  # its answers never stand alone
    path: Path | None = None  # of a set that is not published

    def problem(self, row: Mapping[str, Any]) -> Problem:
        """The problem of a flat row. Raises ValueError for a value that is not as it should be."""
        prompt, answer = row.get(self.prompt), row.get(self.answer)
        if self.path is not None and any(value is None or not str(value).strip() for value in (prompt, answer)):
            return Problem("", "")
        text = _prompt_text(prompt, self.prompt)
        before, after = self.around
        if not text.startswith(before) or not text.endswith(after):
            raise ValueError(f"column {self.prompt!r} must be a problem between the published instructions")
        text = text.removeprefix(before).removesuffix(after).strip()
        return Problem(text, _answer(answer, self.answer, self.is_solution))


def _prompt_text(value: Any, column: str) -> str:
    """A prompt that is text, or the only message before the answer of an assistant; also if that is written as JSON."""
    if isinstance(value, str) and re.match(r"\s*\[\s*\{", value):
        value = json.loads(value)
    if isinstance(value, list):
        roles = [message.get("role") if isinstance(message, Mapping) else None for message in value]
        if roles not in (["user"], ["user", "assistant"]):
            raise ValueError(f"column {column!r} must be text or one message of a user, found messages of {roles}")
        value = value[0].get("content")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {column!r} must be text, found {value!r:.40}")
    return value.strip()


def _answer(value: Any, column: str, is_solution: bool) -> str:
    """An answer given as text or number; numbers lose separators of thousands and decimals of 0 (amc23 has "27.0")."""
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if is_solution or box >= 0 or re.search(r"####[^\n]+\Z", text):
        # One published form has no braces: "\boxed 2" is followed by a single token.
        text = answer_of(re.sub(r"\\boxed +([^\s{$.]+)", r"\\boxed{\1}", text[max(box, 0) :])) or ""
        if re.fullmatch(r"-?\d{1,3}(,\d{3})+", text):
            text = text.replace(",", "")
    if not text or "\n" in text:
        raise ValueError(f"column {column!r} must be an answer, alone, in a box or behind ####, found {value!r:.60}")
    whole = re.fullmatch(r"(-?\d+)\.0*", text)
    return whole[1] if whole else text


DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'

_GSM8K: Final = ("question", "answer", "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866")
_PAPER: Final = ("math500", "amc23", "aime24", "aime25")
# fmt: off
SOURCES: Final = {
    source.name: source
    for source in (
        Source("dapo_math_17k", "train", "prompt", "reward_model.ground_truth", "BytedTsinghua-SIA/DAPO-Math-17k",
               "65877096c24ffa7abc4e4fa5edb95cf3413a5674", tests=_PAPER, around=(DAPO_OPENING, DAPO_CLOSING)),
        Source("math_train", "train", "problem", "solution", "DigitalLearningGmbH/MATH-lighteval",
               "0530c78699ea5e8eb5530600900e1f328b48acad", tests=_PAPER, is_solution=True),
        Source("math500", "test", "problem", "answer", "HuggingFaceH4/MATH-500",
               "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test"),
        Source("amc23", "test", "question", "answer", "math-ai/amc23",
               "80815d37005feb82cd7f8fbc6901d5d3eff43057", "test"),
        Source("aime24", "test", "problem", "answer", "HuggingFaceH4/aime_2024",
               "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"),
        Source("aime25", "test", "problem", "answer", "math-ai/aime25",
               "563bb8404243c5f09de6ec262f2db674fe5bce9b", "test"),
        Source("gsm8k_train", "train", *_GSM8K, "train", "main", ("gsm8k_test",), is_solution=True),
        Source("gsm8k_test", "test", *_GSM8K, "test", "main", is_solution=True),
    )
}
# fmt: on
TEST_SETS = tuple(source.name for source in SOURCES.values() if source.role == "test")
GROUPS: Final = {"gsm8k": ("gsm8k_train", "gsm8k_test"), "all": tuple(SOURCES)}
#: What ``datasets.load_dataset`` calls the readers of files.
FORMATS: Final = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


def local_files(source: Source, folder: Path | None) -> list[Path]:
    """The files of a set: its own, or those of the copy of its repository under ``folder``; none of one on the hub."""
    if source.path is not None:
        return [source.path]
    return sorted(path for path in _copy(source, folder).rglob("*") if path.suffix in FORMATS) if folder else []


def _copy(source: Source, folder: Path) -> Path:
    """Where a copy of its repository lies; two sets of one repository share it."""
    return folder / (source.name if source.subset is None else source.hub_id.partition("/")[2])


def read_problems(source: Source, folder: Path | None) -> Iterator[Problem]:
    """Problems of a source in order: of its own file, the copies under `folder`, or the Hugging Face hub.

    A copy is read as the hub reads a repository: files' names say of which split they are. Raises ValueError for a
    file that is missing or cannot be read, or a row that is not as it should be, with its number.
    """
    from datasets import load_dataset

    place = source.path or (f"{source.hub_id} at {source.revision}" + f" in {folder}" * (folder is not None))
    try:
        if source.path is not None:
            ending = source.path.suffix
            # Text in a table stays: 1.50 is not 1.5.
            as_text = {"converters": dict.fromkeys((source.prompt, source.answer), str)} if ending == ".csv" else {}
            files = str(source.path)
            rows = load_dataset(FORMATS.get(ending, ending), data_files=files, split="train", **as_text)
        elif folder is not None:
            rows = load_dataset(str(_copy(source, folder)), data_dir=source.subset, split=source.split)
        else:
            rows = load_dataset(source.hub_id, source.subset, split=source.split, revision=source.revision)
    except Exception as error:  # of datasets, pyarrow or the network
        way = "" if source.path or folder else "; without network, copy it to DIR and give --source DIR"
        raise ValueError(f"{place} cannot be loaded: {error.__cause__ or error}{way}") from error
    for number, row in enumerate(rows.flatten(), start=1):  # a field of a record is COLUMN.FIELD
        try:
            yield source.problem(row)
        except ValueError as error:
            raise ValueError(f"{place}, row {number}: {error}") from error
