"""The embedded offline task, remainders by repeated subtraction: seeded problems whose lengths vary a hundredfold.

The working of a division subtracts the divisor again and again and writes down each rest; the last is the answer::

    150%44=  ->  106-44=062-44=018

A quotient of q takes 7 q - 4 characters: 3 to 227. It is drawn with probability proportional to 1 / (q + 1), which
spreads the length roughly evenly on a log scale. A long chain has a small divisor: the dividend stays below 1,000.

Chains with the same pair (divisor, remainder) have the same ending (``106%44`` is the end of ``150%44``). A hash of
that pair decides the split, so no subtraction of one split appears in the other, whatever the seeds.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recipe.math.data.rows import write_rows

DATA_SOURCE = "fspo/remainder"
VOCABULARY = tuple("0123456789%-=")
MAX_QUOTIENT = 33
MIN_DIVISOR, MAX_DIVISOR = 3, 99
MAX_DIVIDEND = 999
TEST_SHARE_INVERSE = 8  # one pair of divisor and remainder in eight belongs to the test split

Split = Literal["train", "test"]
SPLITS: tuple[Split, Split] = ("train", "test")

_CUMULATIVE = np.cumsum(1.0 / np.arange(2, MAX_QUOTIENT + 2))


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
        return self.written(range(self.dividend - self.divisor, -1, -self.divisor))

    def written(self, rests: Iterable[int]) -> str:
        """The working with these rests."""
        return f"-{self.divisor:02d}=".join(f"{rest:03d}" for rest in rests)

    @property
    def answer(self) -> str:
        return str(self.dividend % self.divisor)

    @property
    def split(self) -> Split:
        return "train" if zlib.crc32(f"{self.divisor},{self.answer}".encode()) % TEST_SHARE_INVERSE else "test"


def draws(rng: np.random.Generator, split: Split) -> Iterator[Division]:
    """Endless independent problems of a split; they repeat."""
    while True:
        quotient = 1 + int(np.searchsorted(_CUMULATIVE, rng.random() * _CUMULATIVE[-1], side="right"))
        largest = min(MAX_DIVISOR, (MAX_DIVIDEND + 1) // (quotient + 1))
        divisor = int(rng.integers(MIN_DIVISOR, largest + 1))
        problem = Division(quotient * divisor + int(rng.integers(divisor)), divisor)
        if problem.split == split:
            yield problem


def distinct(count: int, seed: int, split: Split) -> list[Division]:
    """``count`` different problems of one split, whatever is drawn of the other; ValueError if there are fewer."""
    problems: dict[Division, None] = {}
    repeated = 0
    for problem in draws(np.random.default_rng([seed, SPLITS.index(split)]), split):
        if len(problems) >= count:
            break
        repeated = repeated + 1 if problem in problems else 0
        problems[problem] = None
        if repeated > 1000 + 5 * len(problems):
            raise ValueError(f"n_{split}={count} is more than there are: {len(problems)} problems were found")
    return list(problems)


def score_answer(text: str, ground_truth: str) -> float:
    """1.0 if the digits behind the last ``=`` of ``text`` are ``ground_truth``, but for leading zeros, else 0.0."""
    answer = text.rpartition("=")[2].strip()
    # Compared as text: int() refuses strings of more than 4,300 digits.
    return float(re.fullmatch("[0-9]+", answer) is not None and answer.lstrip("0") == ground_truth.lstrip("0"))


def rows(count: int, seed: int, split: Split) -> list[dict[str, Any]]:
    """Different problems of one split in verl's schema. Raises ValueError as :func:`distinct`."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": split},
        }
        for index, problem in enumerate(distinct(count, seed, split))
    ]


def write_dataset(folder: str | Path, n_train: int, n_test: int, seed: int, splits: Sequence[Split] = SPLITS) -> None:
    """Write :func:`rows` to ``train.parquet`` and ``test.parquet`` (or one) in ``folder``.

    Raises ValueError as :func:`distinct`; FileExistsError if there is a file of that name that this package has not
    written.
    """
    for split in splits:
        write_rows(rows({"train": n_train, "test": n_test}[split], seed, split), Path(folder) / f"{split}.parquet")
