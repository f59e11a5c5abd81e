"""Whether two readings are one answer: kinds by their parts, numbers exactly, expressions by math-verify."""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recipe.math.answers.limits import Refused
from recipe.math.answers.reading import (
    FILLERS,
    INTEGER,
    LEAF,
    LIST,
    PHRASES,
    REGION,
    RELATION,
    RESIDUE,
    TUPLE,
    UNREAD,
    WORDS,
    Answer,
    based,
)
from recipe.math.answers.units import unit

_MAX_ITEMS = 30


_MATRICES = re.compile(r"\\begin\{[pbB]?matrix\}.*\\end\{[pbB]?matrix\}", re.DOTALL)


def computed(text: str) -> str:
    """A computation with matrices as the matrix that it gives; any other text as it is."""
    import sympy
    from math_verify import parser

    before, name, formula = text.rpartition("=")
    if not _MATRICES.search(formula):
        return text
    try:
        matrix = parser.parse_latex_cached(formula).doit()
        cells = matrix.as_explicit().tolist()
    except Exception:
        return text
    rows = r"\\".join("&".join(map(sympy.latex, row)) for row in cells)
    return f"{before}{name}\\begin{{pmatrix}}{rows}\\end{{pmatrix}}"


def readable(answer: Answer) -> bool:
    if answer.kind == LEAF:
        return answer.text == "..." or based(answer.text) is not None or parsed(answer.text) is not None
    return answer.kind != UNREAD and (answer.kind == RELATION or all(map(readable, answer.parts)))


def says(answer: Answer) -> bool:
    """Whether a sentence was read whole: a value, not words, and no relation of words around a formula."""
    if answer.kind in (UNREAD, WORDS):
        return False
    parts = answer.parts[1:] if is_assignment(answer) else answer.parts
    return all(map(says, parts))


def is_assignment(answer: Answer) -> bool:
    return answer.kind == RELATION and answer.words != ""


def _value(answer: Answer) -> Answer:
    return answer.parts[1] if is_assignment(answer) else answer


def same(target: Answer, answer: Answer, inside: bool = False) -> bool:
    """Whether two readings are one answer.

    Beside equal kinds these pairs count: an assignment and its value, a set of one element and its element, a list and
    a set, assignments and the tuple of their values, a residue and its number, an inequality and its solutions.
    """
    kinds = {target.kind, answer.kind}
    if target == answer:
        return True
    if is_assignment(target) != is_assignment(answer) and kinds != {RELATION}:
        return same(_value(target), _value(answer), inside)
    if kinds == {LEAF}:
        return _same_leaf(target, answer)
    if LIST in kinds:
        return _same_list(target, answer, inside)
    if WORDS in kinds:
        return _folded(target.text) == _folded(answer.text)
    if kinds == {TUPLE}:
        target, answer = (
            _line(side) if {target.form, answer.form} == {"()", "matrix"} else side for side in (target, answer)
        )
        if target.form == answer.form == ":":
            return _same_ratio(target, answer)
        return target.form == answer.form and _in_order(target.parts, answer.parts)
    if kinds == {RELATION}:
        return _same_relation(target, answer)
    special, number = (answer, target) if target.kind == LEAF else (target, answer)
    if special.kind == RESIDUE and number.kind == RESIDUE:
        (gold, modulus), (value, other) = special.parts, number.parts
        return (
            target.text == answer.text
            and same(modulus, other)
            and _equal((parsed(gold.text) - parsed(value.text)) % parsed(modulus.text), parsed("0"))
        )
    if special.kind == RESIDUE:  # 9 mod 2 is not 9
        value, modulus = (parsed(part.text) for part in special.parts)
        return not special.text and value.is_number and bool(abs(value) < modulus) and same(special.parts[0], number)
    if special.form == ":" and special.text != "to" and len(special.parts) == 2:
        return same(Answer(LEAF, "/".join(part.text for part in special.parts)), number)
    return _computes(special) and same(special.parts[-1], number)


def _line(side: Answer) -> Answer:
    """A matrix of one row or one column as a tuple."""
    if side.form != "matrix" or (len(side.parts) > 1 and any(len(row.parts) > 1 for row in side.parts)):
        return side
    return Answer(TUPLE, parts=tuple(cell for row in side.parts for cell in row.parts), form="()")


def _same_ratio(target: Answer, answer: Answer) -> bool:
    """Whether 6 : 8 is 3 : 4."""
    sides = [[parsed(part.text) for part in side.parts] for side in (target, answer)]
    if len(sides[0]) != len(sides[1]) or {None, 0} & {*sides[0], *sides[1]}:  # 12:00 is a time
        return _in_order(target.parts, answer.parts)
    return all(gold * sides[1][0] == value * sides[0][0] for gold, value in zip(*sides, strict=True))


def has_solutions(target: Answer, answer: Answer) -> bool:
    """Whether the two are sets of numbers, such as intervals and inequalities."""

    def inequality(side: Answer) -> bool:
        parts = side.parts if side.kind == LIST else (side,)
        return all(
            part.kind == RELATION and part.parts and not re.search(r"=|\\(?:equiv|in)", part.form) for part in parts
        )

    sides = (target, answer)
    if {target.kind, answer.kind} == {REGION, LIST}:
        return True
    return all(side.kind in (REGION, TUPLE) or inequality(side) for side in sides)


def variables(text: str) -> str:
    """The names of what an inequality is about; one in a set-builder is a dummy."""
    return "".join(sorted(set(re.findall("[a-zA-Z]", re.sub(r"\\\{.*|\\[a-zA-Z]+(?:\{[A-Z]\})?", "", text)))))


def _in_order(targets: Sequence[Answer], answers: Sequence[Answer]) -> bool:
    return len(targets) == len(answers) and all(same(*pair, True) for pair in zip(targets, answers, strict=True))


def _same_list(target: Answer, answer: Answer, inside: bool) -> bool:
    sides = (target, answer)
    if max(len(side.parts) for side in sides) > _MAX_ITEMS:
        raise Refused
    indexed = [any("_" in part.words for part in side.parts if is_assignment(part)) for side in sides]
    if indexed == [False, True]:  # x_1 and x_2 of a truth without an index are two values of x
        parts = tuple(replace(part, words=part.words.partition("_")[0]) for part in answer.parts)
        sides = (target, answer := replace(answer, parts=parts))
    # Values of several names have an order, which a tuple or a list without names has to have.
    named = sum(len({part.words for part in side.parts if is_assignment(part)}) > 1 for side in sides)
    if named == 1:
        forms, of_truth = {target.form, answer.form}, any(map(is_assignment, target.parts))
        labelled = any(is_assignment(part) and part.parts[0].kind == WORDS for part in answer.parts)
        return (
            not any(map(_out_of_order, sides))
            and (forms == {"", "()"} or (forms == {""} and (of_truth or labelled)))
            and _in_order(*(list(map(_value, side.parts)) for side in sides))
        )
    if any(part.text == "..." for side in sides for part in side.parts):  # 1, -1, 1, ... is not -1, 1, -1, ...
        return _in_order(target.parts, answer.parts)
    if inside and target.kind != answer.kind:
        return False
    targets, answers = (side.parts if side.kind == LIST else (side,) for side in sides)
    return all(any(same(t, a, True) for a in answers) for t in targets) and all(
        any(same(t, a, True) for t in targets) for a in answers
    )


def _out_of_order(side: Answer) -> bool:
    """Whether the named values of a list are of letters that follow each other, and stand in another order: y, x."""
    names = [part.words for part in side.parts if is_assignment(part)]
    return names != sorted(names) and "".join(sorted(names)) in string.ascii_lowercase


def _folded(text: str) -> str:
    """Words without case, marks, plural s and FILLERS, and a phrase of PHRASES in its first wording.

    A single letter stays as it is: r is not R.
    """
    if len(text) == 1:
        return text
    words = re.findall(r"\\\W|\\?[^\W_]+|[^\w\s]", re.sub(r"[\x02\x03(),.'-]+|(?<!\\)[{}]", " ", text).lower())
    plain = " ".join(words)
    words = [word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in words]
    words = [word for word in words if word not in FILLERS] or words
    return next((phrase[0] for phrase in PHRASES if {plain, " ".join(words)} & {*phrase}), " ".join(words))


def _same_leaf(target: Answer, answer: Answer) -> bool:
    import sympy

    sides = (target, answer)
    bases = [based(side.text) for side in sides]
    if any(bases):
        integers = [
            base or (int(side.text), 10)
            for base, side in zip(bases, sides, strict=True)
            if base or re.fullmatch(r"\d{1,30}", side.text)
        ]
        return len(integers) == 2 and integers[0] == integers[1]
    if target.words == answer.words and all(re.fullmatch("[a-zA-Z]+", side.text) for side in sides):
        return _folded(target.text) == _folded(answer.text)
    gold, value = (parsed(side.text) for side in sides)
    if gold is None or value is None:
        return False
    if re.fullmatch(r"-?\d*\.\d+", answer.text) and len(answer.text) > _DIGITS_OF_A_FLOAT:
        places = len(answer.text.partition(".")[2])  # what a program printed
        value = gold if gold.is_Rational and abs(gold - value) * 2 * sympy.Integer(10) ** places <= 1 else value
    of_gold, of_value = (unit(side.words) for side in sides)
    gold, value = gold * of_gold.scale, value * of_value.scale
    if of_gold.percent != of_value.percent and any(of.dimension or of.degrees for of in (of_gold, of_value)):
        return False
    if any(of.degrees for of in (of_gold, of_value)) and _TEMPERATURES & {of_gold.dimension, of_value.dimension}:
        return _equal(gold, value)  # 25 degrees may be 25 degrees Celsius
    if of_gold.dimension and of_value.dimension:
        same_dimension = of_gold.dimension == of_value.dimension
        return same_dimension and _equal(gold * of_gold.factor, value * of_value.factor)
    if of_gold.degrees != of_value.degrees and (gold if of_value.degrees else value).has(sympy.pi):
        gold, value = (
            side * sympy.pi / 180 if of.degrees else side for side, of in ((gold, of_gold), (value, of_value))
        )
    if of_gold.percent == of_value.percent:
        return _equal(gold, value)
    if not (gold.is_number and value.is_number):
        return False
    if of_gold.percent:
        return _equal(gold, value) or _equal(gold / 100, value)
    return _equal(gold, value / 100) or (bool(abs(gold) > 1) and _equal(gold, value))


_TEMPERATURES = {frozenset({(scale, 1)}) for scale in "CF"}
_DIGITS_OF_A_FLOAT = 15
_DECIMAL = re.compile(r"(?<!\d)(\d*)\.(\d+)")


def _as_fraction(decimal: re.Match[str]) -> str:
    return f"\\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}}"


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """The expression of a leaf, its decimals exact; None if it has a part that math-verify's parser does not read."""
    import sympy
    from math_verify import parser

    text = _DECIMAL.sub(_as_fraction, text)
    # The parser would leave these out, or multiply.
    if re.search(r"\d\s+\d|\d\s*_|'|\|\||\.", text):
        return None
    try:
        expression = parser.parse_latex_cached(text)
    except Exception:
        return None
    if not isinstance(expression, sympy.Expr) or expression.has(sympy.Derivative):
        return None
    symbols = expression.free_symbols
    return (
        expression.subs(dict.fromkeys(symbols, sympy.I)) if {symbol.name for symbol in symbols} == {"i"} else expression
    )


def _equal(gold: Any, value: Any) -> bool:
    """Closed expressions by their exact values, others by math-verify."""
    import sympy
    from math_verify import verify

    if gold.free_symbols or value.free_symbols:
        gold, value = _aligned(gold, value)
        return gold == value or (
            not _apart(gold, value) and bool(verify(gold, value, timeout_seconds=None, raise_on_error=True))
        )
    gold, value = (side.doit() for side in (gold, value))
    if (gold.is_Rational and value.is_Rational) or gold == value:
        return bool(gold == value)
    if not (gold.is_finite and value.is_finite):
        return False
    difference = abs(sympy.N(gold - value, 60, maxn=400))
    largest = max(abs(sympy.N(gold, 30)), abs(sympy.N(value, 30)))
    return bool(difference.is_number and difference <= largest * sympy.Float("1e-50"))


def _aligned(gold: Any, value: Any) -> tuple[Any, Any]:
    """Both with one name for the integer of a family of angles; twice the first if they range over the same numbers.

    So 5 k + 2 is 5 n - 3 for all integers k and n. Without a domain (n - 2) pi may be of one n, and is not n pi.
    """
    import sympy

    names = [list(side.free_symbols) for side in (gold, value)]
    letters = {name.name for side in names for name in side}
    is_bound = letters == {INTEGER[1:]}
    if list(map(len, names)) != [1, 1] or not (
        is_bound or (letters <= {*"klmn", INTEGER[1:], "xi"} and gold.has(sympy.pi))
    ):
        return gold, value
    letter = names[0][0]
    value = value.subs(names[1][0], letter)
    step, other = (side.diff(letter) for side in (gold, value))
    if is_bound and not step.free_symbols and abs(step) not in (0, 1) and other in (step, -step):
        offset = sympy.simplify(((gold - value) / step).subs(letter, 0))
        return (gold, gold) if offset.is_integer else (gold, value)
    return gold, value


def _is_endless(*sides: Any) -> bool:
    """Whether something in them takes long to evaluate or to simplify."""
    import sympy

    return any(side.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit) for side in sides)


def _apart(one: Any, other: Any) -> bool:
    """A cheap test before math-verify simplifies: whether two expressions differ clearly at one sample point."""
    import sympy

    if _is_endless(one, other):
        return False
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    point = {symbol: sympy.Rational(3 * number + 7, 5) for number, symbol in enumerate(symbols)}
    try:
        values = [complex(sympy.N(side.subs(point), 15)) for side in (one, other)]
    except Exception:  # a function without a name that SymPy knows, a sum that does not converge
        return False
    return abs(values[0] - values[1]) > 1e-6 * max(map(abs, values))


def _steps(relation: Answer) -> list[tuple[str, Any]] | None:
    """Its neighbouring sides as (sign, left minus right); None where a side is not an expression."""
    sides = [parsed(side.text) for side in relation.parts]
    if not sides or any(side is None for side in sides):
        return None
    pairs = zip(relation.form.split(), itertools.pairwise(sides), strict=True)
    return [(sign, left - right) for sign, (left, right) in pairs]


def _same_relation(target: Answer, answer: Answer) -> bool:
    """Relations whose sides differ by a constant factor; by a function for an assignment of the same name."""
    if is_assignment(target) and target.words == answer.words and same(_value(target), _value(answer)):
        return True
    if is_assignment(target) and is_assignment(answer):
        one, other = (re.fullmatch(r"([a-zA-Z])\(([a-zA-Z])\)", side.words) for side in (target, answer))
        if (one or other) and "y" in (target.words, answer.words):  # y = 3 x of f(x) = 3 x
            return same(_value(target), _value(answer))
        if one and other and one[1] == other[1] and one[2] != other[2]:
            gold, value = (parsed(_value(side).text) for side in (target, answer))
            if gold is None or value is None:
                return False
            names = {name.name: name for side in (gold, value) for name in side.free_symbols}
            renamed = [names.get(function[2]) for function in (one, other)]
            return _equal(gold, value if None in renamed else value.subs(renamed[1], renamed[0]))
    left, right = _steps(target), _steps(answer)
    if left is None or right is None or len(left) != len(right):
        return target.text == answer.text
    return all(any(_same_step(one, other) for other in right) for one in left)


def _same_step(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    import sympy

    if one[0] != other[0] or other[1] == 0:
        return False
    sides = [one[1], other[1]]
    if _is_endless(*sides):
        return bool(sides[0] == sides[1])
    if one[0] == "=":  # y / x = 2 and y = 2 x
        sides = [sympy.together(side).as_numer_denom()[0] for side in sides]
    ratio = sides[0] / sides[1]
    if _apart(ratio, ratio.subs({symbol: symbol + 1 for symbol in ratio.free_symbols}, simultaneous=True)):
        return False
    ratio = sympy.simplify(ratio)
    return ratio.is_number and bool(ratio != 0) and (one[0] in ("=", "\\ne") or bool(ratio > 0))


def _computes(relation: Answer) -> bool:
    """Whether it is a computation, such as 256 + 37 = 293."""
    sides = [parsed(side.text) for side in relation.parts]
    is_closed = relation.form == "=" and all(side is not None and not side.free_symbols for side in sides)
    return is_closed and _equal(*sides)
