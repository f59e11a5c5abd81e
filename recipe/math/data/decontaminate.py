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
    """Problems without repetitions, and what was left out.

    `duplicates` counts rows that repeat an earlier problem with the same answer. `conflicting` counts all rows of
    problems that appear with different answers: none of these can be trusted. `empty` counts rows without a problem or
    an answer.
    """

    problems: list[Problem]
    read: int
    duplicates: int
    conflicting: int
    empty: int = 0


def distinct(problems: Iterable[Problem]) -> Distinct:
    """Keep the first of problems that are equal up to Unicode form and white space; drop those with several answers.

    Only one copy of each problem is kept in memory: DAPO-Math-17k has every prompt about a hundred times.
    """
    kept: dict[str, Problem] = {}
    rows: Counter[str] = Counter()
    doubtful: set[str] = set()
    empty = 0
    for problem in problems:
        if not (problem.text and problem.answer):
            empty += 1
            continue
        key = " ".join(unicodedata.normalize("NFKC", problem.text).split())
        rows[key] += 1
        if kept.setdefault(key, problem).answer != problem.answer:
            doubtful.add(key)
    conflicting = sum(rows[key] for key in doubtful)
    result = [problem for key, problem in kept.items() if key not in doubtful]
    return Distinct(result, rows.total() + empty, rows.total() - conflicting - len(result), conflicting, empty)


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
