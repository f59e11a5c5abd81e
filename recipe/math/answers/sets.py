r"""Intervals, inequalities and set-builders as SymPy's sets: ``x<1 \lor x>2`` is ``(-\infty,1)\cup(2,\infty)``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final

from recipe.math.answers.reading import SIGN, split
from recipe.math.answers.spelling import stripped

_NAMED: Final = {"R": "Reals", "Q": "Rationals", "Z": "Integers", "N": "Naturals"}
_JOINED: Final = (("Union", r"\\(?:cup|lor)(?![a-z])"), ("Intersection", r"\\(?:cap|land)(?![a-z])"),
                  ("Complement", r"\\(?:setminus|backslash)(?![a-z])"), ("Intersection", ","))  # fmt: skip
_BUILDER: Final = re.compile(r"\\\{\s*([a-zA-Z])\s*(?:\\in(?![a-z])\s*([^|:]+?))?\s*[|:]\s*(.+)\\\}")
_NAME: Final = re.compile(r"[a-zA-Z](?:\([a-zA-Z]\))?|\|[a-zA-Z]\|")
_INTERVAL: Final = re.compile(r"([(\[])([^,;]+)[,;]([^,;]+)([)\]])")


def real_set(text: str, parse: Callable[[str], Any]) -> Any:
    """The set of real numbers that a cleaned text describes, with closed ends; None where it is not read.

    ``parse`` reads an expression, or returns None.
    """
    import sympy

    text = re.sub(r"\A[a-zA-Z]\s*\\in(?![a-z])\s*", "", stripped(text))
    for name, sign in _JOINED:
        parts = [part for part, _ in split(text, re.compile(sign))]
        if len(parts) > 1:
            sets = [real_set(part, parse) for part in parts]
            joined = None if None in sets else functools.reduce(getattr(sympy, name), sets)
            # x > 0, x < 2 is both, but x < 0, x > 2 is one of them
            return sympy.Union(*sets) if sign == "," and joined is sympy.S.EmptySet else joined
    if text in (r"\emptyset", r"\{\}"):
        return sympy.S.EmptySet
    if match := re.fullmatch(r"\\mathbb\{?([RQZN])\}?", text):
        return getattr(sympy.S, _NAMED[match[1]])
    if match := _BUILDER.fullmatch(text):
        sets = [real_set(part, parse) for part in (match[3], match[2] or r"\mathbb{R}")]
        return None if None in sets else sympy.Intersection(*sets)
    if text.startswith(r"\{") and text.endswith(r"\}"):
        items = [_number(item, parse) for item, _ in split(text[2:-2], re.compile("[,;]"))]
        return None if None in items else sympy.FiniteSet(*items)
    if match := _INTERVAL.fullmatch(text):
        ends = _number(match[2], parse), _number(match[3], parse)
        interval = None if None in ends else sympy.Interval(*ends, match[1] == "(", match[4] == ")")
        return None if interval is sympy.S.EmptySet else interval  # (2, 1) is a point
    return _inequality(list(split(text, SIGN)), parse)


def _number(text: str, parse: Callable[[str], Any]) -> Any:
    value = parse(text.strip())
    return value if value is not None and value.is_extended_real and not value.free_symbols else None


def _inequality(sides: list[tuple[str, str]], parse: Callable[[str], Any]) -> Any:
    """The set of "x < a", "a > x", "a < x < b", "x = a" or "x \\ne a". f(x) and |x| count as names, too."""
    import sympy

    texts, signs = [stripped(side) for side, _ in sides], [sign for _, sign in sides[1:]]
    names = [number for number, text in enumerate(texts) if _NAME.fullmatch(text)]
    if len(texts) not in (2, 3) or len(names) != 1 or (len(texts) == 3 and names != [1]):
        return None
    sets, oo = [sympy.S.Reals], sympy.oo
    for number, sign in enumerate(signs):
        left = names[0] == number  # "x < a", not "a < x"
        value = _number(texts[number + 1 if left else number], parse)
        if value is None or sign not in ("<", ">", r"\le", r"\ge", r"\ne", "="):
            return None
        if sign in ("=", r"\ne"):
            point = sympy.FiniteSet(value)
            sets.append(point if sign == "=" else sympy.Complement(sympy.S.Reals, point))
        else:
            below, is_open = (sign in ("<", r"\le")) == left, sign in "<>"
            ends = (-oo, value, True, is_open) if below else (value, oo, is_open, True)
            sets.append(sympy.Interval(*ends))
    solutions = sympy.Intersection(*sets)
    if "|" in texts[names[0]]:
        right = sympy.Intersection(solutions, sympy.Interval(0, oo))
        return sympy.Union(right, sympy.imageset(lambda value: -value, right))
    return solutions
