"""Removes duplicates within a data set, and training problems that are also in a test set."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from recipe.math.data.sources import Problem

NGRAM: Final = 13
#: N-grams found in more than this many training problems are common phrases, not signs of a copy.
BOILERPLATE: Final = 10
#: LaTeX that only changes how a formula looks.
_FORMATTING: Final = re.compile(r"\\(?:left|right|displaystyle|text|mathrm|quad|qquad|[,;:! ])|[${}~]")
_TOKEN: Final = re.compile(r"\\?[^\W_]+|[^\w\s,.;:?!'\"]")


def distinct(problems: Iterable[Problem]) -> tuple[list[Problem], dict[str, int]]:
    """The first of problems that are equal up to Unicode form and white space, and how many rows were left out.

    Only one copy of each problem is kept in memory: DAPO-Math-17k has every prompt about a hundred times.
    """
    kept: dict[str, Problem] = {}
    counts = {"read": 0, "without_answer": 0, "duplicates": 0}
    for problem in problems:
        text = " ".join(unicodedata.normalize("NFKC", problem.text).split())
        counts["read"] += 1
        counts["without_answer"] += not problem.answer
        counts["duplicates"] += text in kept
        if problem.answer:
            kept.setdefault(text, problem)
    return list(kept.values()), counts


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


def tokens(text: str) -> list[str]:
    """Words, numbers, commands and operators of a problem, without case, punctuation and LaTeX formatting."""
    text = re.sub(r"\\[dt]frac", r"\\frac", unicodedata.normalize("NFKC", text).casefold())
    return _TOKEN.findall(_FORMATTING.sub(" ", text))


def _ngrams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}
