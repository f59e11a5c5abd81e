"""Suggestions for unknown names in error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

_MOST_LETTERS: Final = 2
#: Letters of a word for each wrong one that it may have: ``min`` is two wrong letters from ``max``, which is too many.
_LETTERS_PER_MISTAKE: Final = 3


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`` (did you mean X?)``, or an empty text if no known name is meant.

    X is the known name that ``name`` misspells, or else the only one whose words it abbreviates or spells out. A hint
    for anything else may name a different setting, which would then be accepted silently.
    """
    name, known = str(name), list(known)
    mistakes = {key: letters for key in known if (letters := _mistakes(name, key, known))}
    near = sorted(mistakes, key=lambda key: (mistakes[key], key.lower() != name.lower(), key))
    if not near:  # max_response_len
        abbreviated = [key for key in known if _abbreviates(name, key)]
        near = abbreviated if len(abbreviated) == 1 else []
    return f" (did you mean {near[0]}?)" if near else ""


def _mistakes(name: str, key: str, known: Sequence[str]) -> int:
    """Number of wrong letters if ``name`` misspells ``key``. 0 if it does not, as where a wrong word is a known one."""
    if abs(len(name) - len(key)) > _MOST_LETTERS:
        return 0
    letters = _distance(name.lower(), key.lower())
    if letters > _MOST_LETTERS:
        return 0
    ours, theirs = _words(name), _words(key)
    if len(ours) != len(theirs):  # a separator is missing, or is one too many
        return letters if len(key) > _LETTERS_PER_MISTAKE * letters else 0
    words = {word for other in known for word in _words(other)}
    for mine, right in zip(ours, theirs, strict=True):
        if mine == right:
            continue
        is_ending = _one_begins(mine, right)  # file and files, coef and coeff
        most = max(len(mine), len(right)) // _LETTERS_PER_MISTAKE
        if max(len(mine), len(right)) <= _LETTERS_PER_MISTAKE:  # opo is not a mistyped ppo, and mtp is not tp
            most = int(is_ending or sorted(mine) == sorted(right))
        if _distance(mine, right) > most or (mine in words and not is_ending):
            return 0
    return letters or 1  # they differ in upper and lower case only


def _abbreviates(name: str, key: str) -> bool:
    """Whether the names have as many words, and of each pair one begins the other (with three letters or more)."""
    ours, theirs = _words(name), _words(key)
    return len(ours) == len(theirs) and all(
        mine == right or (min(len(mine), len(right)) >= 3 and _one_begins(mine, right))
        for mine, right in zip(ours, theirs, strict=True)
    )


def _one_begins(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _distance(one: str, other: str) -> int:
    """Edit distance: letters missing, added, wrong, or swapped with the next one (optimal string alignment)."""
    before, last = list[int](), list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        new = [row]
        for column, theirs in enumerate(other, 1):
            new.append(min(last[column] + 1, new[-1] + 1, last[column - 1] + (letter != theirs)))
            if row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == theirs:
                new[-1] = min(new[-1], before[column - 2] + 1)
        before, last = last, new
    return last[-1]
