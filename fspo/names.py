"""What an error adds to a name that nothing has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

_MOST_LETTERS: Final = 2
#: A word may have one wrong letter for so many that it has: ``min`` is no mistyped ``max``.
_LETTERS_PER_MISTAKE: Final = 3


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` with the known name that ``name`` is a typing mistake of; an empty text if there is none.

    A hint that is no typing mistake's remedy names another setting, which is then taken in silence.
    """
    known = list(known)
    near = [(distance, key) for key in known if (distance := _mistakes(str(name), key, known))]
    return f" (did you mean {min(near)[1]}?)" if near else ""


def _mistakes(name: str, key: str, known: Sequence[str]) -> int:
    """The wrong letters of a name that was meant to be another; 0 if it is none, or if a word of it is another one."""
    if abs(len(name) - len(key)) > _MOST_LETTERS:
        return 0
    letters = _distance(name.lower(), key.lower())
    if letters > _MOST_LETTERS:
        return 0
    ours, theirs = _words(name), _words(key)
    if len(ours) != len(theirs):  # a stroke is missing, or is too many
        return letters if len(key) > _LETTERS_PER_MISTAKE * letters else 0
    words = {word for other in known for word in _words(other)}
    for mine, right in zip(ours, theirs, strict=True):
        if mine == right:
            continue
        is_ending = right.startswith(mine) or mine.startswith(right)  # file and files, coef and coeff
        most = max(len(mine), len(right)) // _LETTERS_PER_MISTAKE
        if _distance(mine, right) > most or (mine in words and not is_ending):
            return 0
    return letters or 1  # they differ in upper and lower case only


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _distance(one: str, other: str) -> int:
    """Letters that are missing, too many, wrong or swapped with the next (optimal string alignment)."""
    before, last = list[int](), list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        new = [row]
        for column, theirs in enumerate(other, 1):
            new.append(min(last[column] + 1, new[-1] + 1, last[column - 1] + (letter != theirs)))
            if row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == theirs:
                new[-1] = min(new[-1], before[column - 2] + 1)
        before, last = last, new
    return last[-1]
