"""Removes duplicates within a data set, and training problems that are also in a test set."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from recipe.math.data.sources import Problem
from recipe.math.wording import tokens

NGRAM = 13
BOILERPLATE = 10
"""N-grams found in more than this many training problems are common phrases, not signs of a copy."""


@dataclass(frozen=True)
class Distinct:
    """Problems without repetitions, and how many rows were read, repeat an earlier problem, or lack text or answer."""

    problems: list[Problem]
    read: int
    duplicates: int
    empty: int


def distinct(problems: Iterable[Problem]) -> Distinct:
    """Keep the first of problems that are equal up to Unicode form and white space.

    Only one copy of each problem is kept in memory: DAPO-Math-17k has every prompt about a hundred times.
    """
    kept: dict[str, Problem] = {}
    read = empty = 0
    for read, problem in enumerate(problems, 1):  # noqa: B007
        if problem.text and problem.answer:
            kept.setdefault(" ".join(unicodedata.normalize("NFKC", problem.text).split()), problem)
        else:
            empty += 1
    return Distinct(list(kept.values()), read, read - empty - len(kept), empty)


def without_overlap(
    train: Sequence[Problem], tests: Mapping[str, Sequence[Problem]]
) -> tuple[list[Problem], dict[str, dict[str, int]]]:
    """Training problems that share neither their normalised text nor an n-gram of NGRAM tokens with a test problem.

    N-grams found in more than BOILERPLATE training problems do not count, such as "where m and n are relatively prime
    positive integers, find m + n". This rule is defined here: without it a third of a competition set would be dropped
    for its common phrases. A problem that overlaps with several test sets is counted for each, as ``same_text`` or else
    as ``shared_ngram``.
    """
    train_tokens = [tokens(problem.text) for problem in train]
    frequency = Counter(ngram for words in train_tokens for ngram in _ngrams(words))
    dropped: set[int] = set()
    overlaps: dict[str, dict[str, int]] = {}
    for name, problems in tests.items():
        test_tokens = [tokens(problem.text) for problem in problems]
        texts = {tuple(words) for words in test_tokens}
        ngrams = {ngram for words in test_tokens for ngram in _ngrams(words) if frequency[ngram] <= BOILERPLATE}
        same = {i for i, words in enumerate(train_tokens) if tuple(words) in texts}
        shared = {i for i, words in enumerate(train_tokens) if not ngrams.isdisjoint(_ngrams(words))} - same
        overlaps[name] = {"same_text": len(same), "shared_ngram": len(shared)}
        dropped |= same | shared
    return [problem for i, problem in enumerate(train) if i not in dropped], overlaps


def _ngrams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}
