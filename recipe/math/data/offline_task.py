"""The embedded offline task, remainders by repeated subtraction: seeded problems whose lengths vary a hundredfold.

A problem asks for the remainder of a division (task defined here). Its working subtracts the divisor again and again
and writes down each rest; the last number is the answer::

    150%44=  ->  106-44=062-44=018

A quotient of q therefore takes 7 q - 4 characters: 3 for a single subtraction, 227 for the largest. The quotient is
drawn with probability proportional to 1 / (q + 1), which spreads the length of the working roughly evenly on a log
scale. A long chain has a small divisor, because the dividend stays below 1,000.

Chains with the same pair (divisor, remainder) have the same ending (``106%44`` is the end of ``150%44``). A hash of
that pair decides the split, so no subtraction of one split appears in the other, whatever the seeds.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fspo.files import write_rows

DATA_SOURCE = "fspo/remainder"
VOCABULARY = tuple("0123456789%-=")
MAX_QUOTIENT = 33
MIN_DIVISOR, MAX_DIVISOR = 3, 99
MAX_DIVIDEND = 999
TEST_SHARE_INVERSE = 8  # one split_key in eight belongs to the test split

Split = Literal["train", "test"]
SPLITS: tuple[Split, Split] = ("train", "test")
Row = dict[str, Any]

_INTEGER = re.compile(r"[0-9]+")
_QUOTIENTS = np.arange(1, MAX_QUOTIENT + 1)
_CUMULATIVE = np.cumsum(1.0 / (_QUOTIENTS + 1))

Draw = Callable[[np.random.Generator], Any]
"""Draws a problem: an object with the ``question``, ``answer``, ``split_key`` and ``size`` of :class:`Division`."""


@dataclass(frozen=True)
class Division:
    """The remainder of ``dividend`` by ``divisor``; the dividend is at least the divisor."""

    dividend: int
    divisor: int

    @property
    def question(self) -> str:
        """The question, without the ``=`` that the chat template adds: ``150%44``. Numbers have a fixed width."""
        return f"{self.dividend:03d}%{self.divisor:02d}"

    @property
    def working(self) -> str:
        """The full response: ``106-44=062-44=018``."""
        rests = range(self.dividend - self.divisor, -1, -self.divisor)
        return f"-{self.divisor:02d}=".join(f"{rest:03d}" for rest in rests)

    @property
    def answer(self) -> str:
        return str(self.dividend % self.divisor)

    @property
    def split_key(self) -> str:
        return f"{self.divisor},{self.answer}"

    @property
    def size(self) -> int:
        """The quotient: the number of subtractions."""
        return self.dividend // self.divisor


def draw(rng: np.random.Generator) -> Division:
    """One problem, of either split."""
    quotient = int(_QUOTIENTS[np.searchsorted(_CUMULATIVE, rng.random() * _CUMULATIVE[-1], side="right")])
    largest = min(MAX_DIVISOR, (MAX_DIVIDEND + 1) // (quotient + 1))
    divisor = int(rng.integers(MIN_DIVISOR, largest + 1))
    return Division(quotient * divisor + int(rng.integers(divisor)), divisor)


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


def sample_problems(draw: Draw, rng: np.random.Generator, split: Split) -> Iterator[Any]:
    """Endless independent draws of problems of ``split``; they repeat."""
    while True:
        problem = draw(rng)
        if split == ("test" if zlib.crc32(problem.split_key.encode("ascii")) % TEST_SHARE_INVERSE == 0 else "train"):
            yield problem


def distinct(draw: Draw, count: int, seed: int, split: Split) -> list[Any]:
    """``count`` different problems of one split.

    Raises:
        ValueError: a negative count or seed, or more problems than there are.
    """
    for key, value in ((f"n_{split}", count), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{key} must be 0 or more, got {value}")
    problems: dict[Any, None] = {}
    draws = sample_problems(draw, np.random.default_rng([seed, SPLITS.index(split)]), split)
    repeated = 0
    while len(problems) < count:
        known = len(problems)
        problems[next(draws)] = None
        repeated = repeated + 1 if len(problems) == known else 0
        if repeated > 1000 + 5 * known:
            raise ValueError(
                f"n_{split}={count} is more than there are: {known} problems were found; give at most that"
            )
    return list(problems)


def generate(n_train: int, n_test: int, seed: int) -> tuple[list[Division], list[Division]]:
    """Train and test problems; no two are equal, and ``n_train`` does not change the test problems.

    Raises:
        ValueError: as :func:`distinct`.
    """
    return distinct(draw, n_train, seed, "train"), distinct(draw, n_test, seed, "test")


def to_rows(problems: Sequence[Any], split: Split, data_source: str = DATA_SOURCE, ability: str = "math") -> list[Row]:
    """The problems as rows in verl's data schema."""
    return [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": ability,
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": split, "size": problem.size},
        }
        for index, problem in enumerate(problems)
    ]


def write_dataset(
    folder: str | Path, n_train: int, n_test: int, seed: int, splits: Sequence[Split] = SPLITS
) -> dict[Split, Path]:
    """Write the problems of :func:`generate` to ``train.parquet`` and ``test.parquet`` (or one) in ``folder``.

    A file that holds these problems already is left as it is.

    Raises:
        ValueError: as :func:`distinct`.
        FileExistsError: there is a file of that name that this package has not written.
    """
    import pyarrow.parquet as pq

    problems = dict(zip(SPLITS, generate(n_train, n_test, seed), strict=True))
    paths = {split: Path(folder) / f"{split}.parquet" for split in splits}
    for split, path in paths.items():
        rows = to_rows(problems[split], split)
        with contextlib.suppress(Exception):  # write_rows decides about a file that cannot be read
            if pq.read_table(path).to_pylist() == rows:
                continue
        write_rows(rows, path)
    return paths
