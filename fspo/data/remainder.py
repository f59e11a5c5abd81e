"""Remainders by repeated subtraction: the offline task whose lengths vary a hundredfold.

A problem asks for the remainder of a division (task defined here). Its working subtracts the divisor again and again
and writes down each rest; the last number is the answer::

    150%44=  ->  106-44=062-44=018

A quotient of q therefore takes 7 q - 4 characters: 3 for a single subtraction, 227 for the largest. The quotient is
drawn with probability proportional to 1 / (q + 1), which spreads the length of the working roughly evenly on a log
scale. A long chain has a small divisor, because the dividend stays below 1,000.

Chains with the same pair (divisor, remainder) have the same ending (``106%44`` is the end of ``150%44``). The split is
decided by that pair, so no subtraction of one split appears in the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

VOCABULARY = tuple("0123456789%-=")
MAX_QUOTIENT = 33
MIN_DIVISOR, MAX_DIVISOR = 3, 99
MAX_DIVIDEND = 999

_INTEGER = re.compile(r"[0-9]+")
_QUOTIENTS = np.arange(1, MAX_QUOTIENT + 1)
_CUMULATIVE = np.cumsum(1.0 / (_QUOTIENTS + 1))


@dataclass(frozen=True)
class Division:
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
    def slips(self) -> list[int]:
        """The subtractions, counted from 0, whose units digit has to borrow from the tens: 0 and 2 of ``150%44``."""
        values = range(self.dividend, self.divisor - 1, -self.divisor)
        return [step for step, value in enumerate(values) if value % 10 < self.divisor % 10]

    def slip(self, step: int) -> str:
        """The working that forgets the borrow of one subtraction and continues from there: ``116-44=072-44=028``.

        That result is 10 too large, so the answer is wrong unless the divisor is 5. The length hardly changes.

        Raises:
            ValueError: subtraction ``step`` does not borrow.
        """
        if step not in self.slips:
            raise ValueError(f"subtraction {step} of {self.question} does not borrow, only {self.slips} do")
        before = [self.dividend - self.divisor * (done + 1) for done in range(step)]
        return self._written([*before, *range(self.dividend - self.divisor * (step + 1) + 10, -1, -self.divisor)])

    def _written(self, rests: Iterable[int]) -> str:
        return f"-{self.divisor:02d}=".join(f"{rest:03d}" for rest in rests)

    @property
    def quotient(self) -> int:
        return self.dividend // self.divisor

    @property
    def answer(self) -> str:
        return str(self.dividend % self.divisor)

    @property
    def split_key(self) -> str:
        return f"{self.divisor},{self.answer}"

    @property
    def size(self) -> int:
        """The quotient: the number of subtractions."""
        return self.quotient


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
