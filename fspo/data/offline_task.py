"""The embedded offline task: remainders by repeated subtraction. The length of the working varies a hundredfold.

A problem asks for the remainder of a division (task defined here). Its working subtracts the divisor again and again
and writes down each rest; the last number is the answer::

    150%44=  ->  106-44=062-44=018

A quotient of q therefore takes 7 q - 4 characters: 3 for a single subtraction, 227 for the largest. The quotient is
drawn with probability proportional to 1 / (q + 1), which spreads the length of the working roughly evenly on a log
scale. A long chain has a small divisor, because the dividend stays below 1,000.

Train and test have no problem in common, whatever the seeds: a hash of the pair (divisor, remainder) decides the split
of a problem. Chains with the same pair have the same ending (``106%44`` is the end of ``150%44``), so no subtraction of
one split appears in the other.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fspo.files import write_rows

DATA_SOURCE = "fspo/remainder"
ABILITY = "math"
ALPHABET = "0123456789%-="
MAX_QUOTIENT = 33
MIN_DIVISOR, MAX_DIVISOR = 3, 99
MAX_DIVIDEND = 999
TEST_SHARE_INVERSE = 8  # one pair (divisor, remainder) in eight belongs to the test split

Split = Literal["train", "test"]
SPLITS: tuple[Split, Split] = ("train", "test")
Row = dict[str, Any]

_INTEGER = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Problem:
    """The remainder of ``dividend`` by ``divisor``; the dividend is at least the divisor."""

    dividend: int
    divisor: int

    def __post_init__(self) -> None:
        if not 0 < self.divisor <= self.dividend:
            raise ValueError(f"need 0 < divisor <= dividend, got {self.dividend}%{self.divisor}")

    @property
    def question(self) -> str:
        """The question, without the ``=`` that the chat template adds: ``150%44``. Numbers have a fixed width."""
        return f"{self.dividend:03d}%{self.divisor:02d}"

    @property
    def working(self) -> str:
        """The full response: ``106-44=062-44=018``."""
        return self._written(range(self.dividend - self.divisor, -1, -self.divisor))

    @property
    def borrows(self) -> list[int]:
        """The subtractions, counted from 0, whose units digit has to borrow from the tens: 0 and 2 of ``150%44``."""
        values = range(self.dividend, self.divisor - 1, -self.divisor)
        return [step for step, value in enumerate(values) if value % 10 < self.divisor % 10]

    def slip(self, step: int) -> str:
        """The working that forgets the borrow of one subtraction and continues from there: ``116-44=072-44=028``.

        That result is 10 too large, so the answer is wrong unless the divisor is 5. The length hardly changes.

        Raises:
            ValueError: subtraction ``step`` does not borrow.
        """
        if step not in self.borrows:
            raise ValueError(f"subtraction {step} of {self.question} does not borrow, only {self.borrows} do")
        before = [self.dividend - self.divisor * (done + 1) for done in range(step)]
        return self._written([*before, *range(self.dividend - self.divisor * (step + 1) + 10, -1, -self.divisor)])

    def _written(self, rests: Iterable[int]) -> str:
        return f"-{self.divisor:02d}=".join(f"{rest:03d}" for rest in rests)

    @property
    def quotient(self) -> int:
        return self.dividend // self.divisor

    @property
    def answer(self) -> int:
        return self.dividend % self.divisor

    @property
    def split(self) -> Split:
        digest = zlib.crc32(f"{self.divisor},{self.answer}".encode("ascii"))
        return "test" if digest % TEST_SHARE_INVERSE == 0 else "train"


def sample_problems(rng: np.random.Generator, split: Split) -> Iterator[Problem]:
    """Endless independent draws of problems of ``split``; they repeat."""
    quotients = np.arange(1, MAX_QUOTIENT + 1)
    weights = 1.0 / (quotients + 1)
    cumulative = np.cumsum(weights)
    while True:
        quotient = int(quotients[np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")])
        largest = min(MAX_DIVISOR, (MAX_DIVIDEND + 1) // (quotient + 1))
        divisor = int(rng.integers(MIN_DIVISOR, largest + 1))
        problem = Problem(quotient * divisor + int(rng.integers(divisor)), divisor)
        if problem.split == split:
            yield problem


def generate(n_train: int, n_test: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Distinct train and test problems: no two are equal, within a split or across the two.

    Args:
        n_train, n_test: numbers of problems; 0 is allowed.
        seed: seeds a numpy Generator per split, so that n_train does not change the test problems.

    Raises:
        ValueError: a negative size or seed.
    """
    for name, value in (("n_train", n_train), ("n_test", n_test), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")
    return _distinct(n_train, seed, "train"), _distinct(n_test, seed, "test")


def score_answer(text: str, ground_truth: str) -> float:
    """1.0 if what follows the last ``=`` of ``text`` (all of it where there is none) is ``ground_truth``, else 0.0.

    Surrounding white space and leading zeros do not matter; anything that is not a row of ASCII digits scores 0.0.

    Raises:
        ValueError: ``ground_truth`` is not a non-negative integer: a defect of the data set.
    """
    truth = ground_truth.strip()
    if not _INTEGER.fullmatch(truth):
        raise ValueError(f"ground_truth must be a non-negative integer as text, got {ground_truth!r}")
    answer = text.rpartition("=")[2].strip()
    # Compared as text: int() refuses strings of more than 4,300 digits.
    return float(_INTEGER.fullmatch(answer) is not None and answer.lstrip("0") == truth.lstrip("0"))


def to_rows(problems: Sequence[Problem], split: Split) -> list[Row]:
    """The problems as rows in verl's data schema."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": ABILITY,
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"index": index, "split": split, "quotient": problem.quotient},
        }
        for index, problem in enumerate(problems)
    ]


def write_dataset(
    out_dir: Path, n_train: int, n_test: int, seed: int, splits: Sequence[Split] = SPLITS
) -> dict[Split, Path]:
    """Generates the task and writes ``train.parquet`` and ``test.parquet`` (or one of them) under ``out_dir``.

    A file that holds these problems already is left as it is.

    Returns:
        The path of each split.

    Raises:
        FileExistsError: there is a file of that name that this package has not written.
    """
    import pyarrow.parquet as pq

    problems = dict(zip(SPLITS, generate(n_train, n_test, seed), strict=True))
    paths = {split: out_dir / f"{split}.parquet" for split in splits}
    for split, path in paths.items():
        rows = to_rows(problems[split], split)
        with contextlib.suppress(Exception):  # write_rows decides about a file that cannot be read
            if pq.read_table(path).to_pylist() == rows:
                continue
        write_rows(rows, path)
    return paths


def _distinct(count: int, seed: int, split: Split) -> list[Problem]:
    rng = np.random.default_rng([seed, 0 if split == "train" else 1])
    seen: set[Problem] = set()
    problems: list[Problem] = []
    draws = sample_problems(rng, split)
    while len(problems) < count:
        problem = next(draws)
        if problem not in seen:
            seen.add(problem)
            problems.append(problem)
    return problems
