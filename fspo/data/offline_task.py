"""The embedded offline tasks: seeded problems with a program that checks the answer, written in verl's schema.

``remainder`` is mathematics with working of widely varying length (:mod:`fspo.data.remainder`); ``words`` sorts lists
of words, short or long ones (:mod:`fspo.data.words`). Train and test of a task have no problem in common, whatever the
seeds: a hash of the problem's ``split_key`` decides where it belongs.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from fspo.data import remainder, words
from fspo.files import write_rows

TEST_SHARE_INVERSE = 8  # one split_key in eight belongs to the test split

Split = Literal["train", "test"]
SPLITS: tuple[Split, Split] = ("train", "test")
Row = dict[str, Any]


class Problem(Protocol):
    """What the problems of all tasks have."""

    @property
    def question(self) -> str:
        """The prompt, without the ``=`` that the chat template adds."""

    @property
    def working(self) -> str:
        """A full and right response."""

    @property
    def answer(self) -> str:
        """The ground truth."""

    @property
    def split_key(self) -> str:
        """Problems with the same key are in the same split."""

    @property
    def size(self) -> int:
        """What the length of the working depends on."""

    @property
    def slips(self) -> Sequence[int]:
        """The places where a careless solver can go wrong without changing the length of the working much."""

    def slip(self, place: int) -> str:
        """The response with that slip."""


@dataclass(frozen=True)
class Task:
    """How to draw problems and judge responses."""

    data_source: str
    ability: str
    vocabulary: tuple[str, ...]  # the tokens of questions and responses
    draw: Callable[[np.random.Generator], Problem]
    score_answer: Callable[[str, str], float]  # response, ground truth


TASKS = {
    "remainder": Task("fspo/remainder", "math", remainder.VOCABULARY, remainder.draw, remainder.score_answer),
    "words": Task("fspo/words", "text", words.VOCABULARY, words.draw, words.score_answer),
}
BY_DATA_SOURCE = {task.data_source: task for task in TASKS.values()}


def find_task(name: str) -> Task:
    """The task of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in TASKS:
        raise ValueError(f"name={name!r} is not an offline task: choose from {', '.join(TASKS)}")
    return TASKS[name]


def split_of(problem: Problem) -> Split:
    """The split that a problem belongs to."""
    return "test" if zlib.crc32(problem.split_key.encode("ascii")) % TEST_SHARE_INVERSE == 0 else "train"


def sample_problems(task: Task, rng: np.random.Generator, split: Split) -> Iterator[Problem]:
    """Endless independent draws of problems of ``split``; they repeat."""
    while True:
        problem = task.draw(rng)
        if split_of(problem) == split:
            yield problem


def generate(n_train: int, n_test: int, seed: int, name: str = "remainder") -> tuple[list[Problem], list[Problem]]:
    """Distinct train and test problems: no two are equal, within a split or across the two.

    Args:
        n_train, n_test: numbers of problems; 0 is allowed.
        seed: seeds a numpy Generator per split, so that n_train does not change the test problems.
        name: a key of :data:`TASKS`.

    Raises:
        ValueError: a negative size or seed, more problems than there are, or an unknown task.
    """
    for key, value in (("n_train", n_train), ("n_test", n_test), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{key} must be 0 or more, got {value}")
    task = find_task(name)
    return _distinct(task, n_train, seed, "train"), _distinct(task, n_test, seed, "test")


def to_rows(problems: Sequence[Problem], split: Split, task: Task) -> list[Row]:
    """The problems as rows in verl's data schema."""
    return [
        {
            "data_source": task.data_source,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": task.ability,
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": split, "size": problem.size},
        }
        for index, problem in enumerate(problems)
    ]


def write_dataset(
    out_dir: Path, n_train: int, n_test: int, seed: int, name: str = "remainder", splits: Sequence[Split] = SPLITS
) -> dict[Split, Path]:
    """Generates a task and writes ``train.parquet`` and ``test.parquet`` (or one of them) under ``out_dir``.

    A file that holds these problems already is left as it is.

    Returns:
        The path of each split.

    Raises:
        ValueError: a negative size or seed, more problems than there are, or an unknown task.
        FileExistsError: there is a file of that name that this package has not written.
    """
    import pyarrow.parquet as pq

    problems = dict(zip(SPLITS, generate(n_train, n_test, seed, name), strict=True))
    paths = {split: out_dir / f"{split}.parquet" for split in splits}
    for split, path in paths.items():
        rows = to_rows(problems[split], split, find_task(name))
        with contextlib.suppress(Exception):  # write_rows decides about a file that cannot be read
            if pq.read_table(path).to_pylist() == rows:
                continue
        write_rows(rows, path)
    return paths


def _distinct(task: Task, count: int, seed: int, split: Split) -> list[Problem]:
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    problems: dict[Problem, None] = {}
    draws = sample_problems(task, rng, split)
    repeated = 0
    while len(problems) < count:
        found = len(problems)
        problems[next(draws)] = None
        repeated = repeated + 1 if len(problems) == found else 0
        if repeated > 1000 + 5 * found:
            raise ValueError(
                f"n_{split}={count} is more than there are: {found} problems were found; give at most that"
            )
    return list(problems)
