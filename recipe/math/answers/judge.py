"""One verdict on a response, with the reason: by the kinds of answer and truth, or by math-verify alone."""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, NamedTuple

from recipe.math.answers.extraction import answer_texts, bare, formula, said
from recipe.math.answers.limits import MAX_EXPRESSION_CHARS, Refused
from recipe.math.answers.reading import (
    DOMAIN,
    FILLERS,
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
    choice,
    cleaned,
    read,
    trusted,
    unglued,
)
from recipe.math.answers.sets import real_set
from recipe.math.answers.units import unit
from recipe.math.answers.verdict import Status

_MAX_ITEMS = 30


def judge(response: str, truth: str, normalise: bool) -> Status:
    """The verdict on a response: by the kinds of answer and truth, or math-verify's own if not ``normalise``.

    Exceptions become statuses: running out of memory or recursion is a failed comparison, a limit of `limits` REFUSED.
    """
    try:
        return by_kind(response, truth) if normalise else _plain(response, truth)
    except Refused:
        return Status.REFUSED
    except Exception:
        return Status.COMPARE_FAILED


# ---------------------------------------------------------------- math-verify's own verdict


def _plain(response: str, truth: str) -> Status:
    """As math-verify with the targets of verl 0.9.1's `math_verify` scorer; a match of any pair of readings counts."""
    try:
        gold = _parse_truth(truth)
    except (Exception, Refused):
        gold = ()
    return _judge_text(response, gold) if gold else Status.BAD_TRUTH


def _parse_response(text: str) -> list[Any]:
    from math_verify import parse
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    targets = (ExprExtractionConfig(), LatexExtractionConfig())
    return list(parse(text, targets, parsing_timeout=None, raise_on_error=True))


def _judge_text(text: str, gold: tuple[Any, ...]) -> Status:
    from math_verify import verify

    try:
        predictions = _parse_response(text)
    except Refused:
        return Status.REFUSED
    except Exception:
        return Status.PARSE_FAILED
    if not predictions:
        return Status.NO_ANSWER
    failed = False
    for target, prediction in product(gold, predictions):
        try:
            if verify(target, prediction, timeout_seconds=None, raise_on_error=True):
                return Status.CORRECT
        except Refused:
            return Status.REFUSED
        except Exception:
            failed = True
    if failed:
        return Status.COMPARE_FAILED
    return Status.PARSE_FAILED if all(isinstance(p, str) for p in predictions) else Status.WRONG


@functools.lru_cache(maxsize=4096)
def _parse_truth(truth: str) -> tuple[Any, ...]:
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig

    return tuple(parse(f"\\boxed{{{truth}}}", (LatexExtractionConfig(),), parsing_timeout=None, raise_on_error=True))


# ---------------------------------------------------------------- by kind


def by_kind(text: str, truth: str) -> Status:
    """Whether the answer of a text is the truth: by REFUSALS and ACCEPTANCES, whose order does not matter."""
    extract = answer_texts(text)
    sentence = said(text) if extract.in_sentence else ""
    texts = [unglued(part) for part in extract.texts or bare(text)] or _last_numbers(sentence) or formula(sentence)
    if not texts:
        return Status.NO_ANSWER
    gold = trusted(truth)
    gold = next(iter(answer_texts(gold).texts), gold)
    if max(map(len, (gold, texts[0]))) > MAX_EXPRESSION_CHARS:
        return Status.CORRECT if texts[0].strip() == trusted(truth).strip() else Status.REFUSED
    sides = _Sides(text, truth, texts, _computed(cleaned(gold)), sentence)
    if any(rule.applies(sides) for rule in REFUSALS):
        return Status.WRONG
    if any(rule.applies(sides) for rule in ACCEPTANCES):
        return Status.CORRECT
    if not _readable(sides.target):
        return Status.BAD_TRUTH
    return Status.WRONG if sides.readable else Status.PARSE_FAILED


@dataclass(frozen=True)
class _Sides:
    """A response and its truth, as far as they are read."""

    text: str
    truth: str
    texts: list[str]  # the answer of the response; then that with all of its boxes
    target_text: str  # cleaned
    sentence: str  # the last one with a number, if the answer is neither in a box nor in tags

    @functools.cached_property
    def answers(self) -> list[str]:
        return [_computed(cleaned(part)) for part in self.texts if len(part) <= MAX_EXPRESSION_CHARS]

    @functools.cached_property
    def both(self) -> tuple[str, str]:
        return self.target_text, self.answers[0]

    @functools.cached_property
    def target(self) -> Answer:
        return read(self.target_text)

    @functools.cached_property
    def choices(self) -> tuple[str, str]:
        """The letters of truth and answer; two empty ones, unless both are choices."""
        letters = choice(self.target_text)
        is_letter = letters and re.fullmatch(r"\W*\w\W*", self.answers[0])
        chosen = choice(self.answers[0].upper() if is_letter else self.answers[0], with_text=True)
        letters = letters or choice(self.target_text, with_text=True)
        return (letters, chosen) if letters and chosen else ("", "")

    @functools.cached_property
    def readable(self) -> list[Answer]:
        """The readings of the answer. All boxes are the answer only where the truth is a list."""
        readings = [read(answer) for answer in (self.answers if self.target.kind == LIST else self.answers[:1])]
        if choice(self.answers[0], with_text=True):
            readings.append(read(re.sub("\\A\\(?\x02?\\(?[A-Z][).:\x03]+", "", self.answers[0])))
        has_value = re.search(r"[\d$\\]", self.texts[0]) or readings[0].text.isdigit()
        if self.sentence and self.target.kind != WORDS and not (has_value and _says(readings[0])):
            readings = [read(cleaned(number)) for number in _last_numbers(self.sentence)]
        return [answer for answer in readings if _readable(answer)]

    @functools.cached_property
    def are_sets(self) -> bool:
        return bool(self.readable) and _readable(self.target) and _has_solutions(self.target, self.readable[0])


def _is_another_choice(sides: _Sides) -> bool:
    return sides.choices[0] != sides.choices[1]


def _has_another_domain(sides: _Sides) -> bool:
    return _differ([re.sub(r"[\s{}.)]", "", match[1]) for side in sides.both if (match := DOMAIN.search(side))])


def _is_another_half_of_a_day(sides: _Sides) -> bool:
    return _differ([match[1].lower() for side in sides.both if (match := _HALF_OF_A_DAY.search(side))])


def _differ(values: list[str]) -> bool:
    return len(set(values)) > 1


def _has_a_decimal_comma(sides: _Sides) -> bool:
    pair = [text.strip("$ ").replace("{,}", ",") for text in (trusted(sides.truth), sides.texts[0])]
    return any(
        re.fullmatch(r"-?\d+\.\d+", one) and one.replace(".", ",") == other
        for one, other in itertools.permutations(pair)
    )


def _is_spelled_alike(sides: _Sides) -> bool:
    texts = {re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\s+", " ", side)) for side in sides.both}
    return len(texts) == 1 and texts != {""}


def _is_the_same_choice(sides: _Sides) -> bool:
    return sides.choices[0] == sides.choices[1] != ""


def _reads_the_same(sides: _Sides) -> bool:
    if not _readable(sides.target):
        return False
    joined = [set(re.findall(r"\\l(?:and|or)(?![a-z])", side)) for side in sides.both]
    if sides.are_sets and all(joined) and joined[0] != joined[1]:
        return False  # x<1 and x>2 is not x<1 or x>2
    targets = (sides.target, *_right_side(sides.target))
    return any(same(target, answer) for target in targets for answer in sides.readable)


def _is_the_same_set(sides: _Sides) -> bool:
    if not sides.are_sets:
        return False
    gold, value = (real_set(side, _parsed) for side in sides.both)
    one_name = len({names for side in sides.both if (names := _variables(side))}) < 2
    return gold is not None and gold == value and one_name


class Rule(NamedTuple):
    """One way to decide, with a response and a truth that no other rule decides so."""

    applies: Callable[[_Sides], bool]
    response: str
    truth: str


#: If one of them applies, an answer is wrong.
REFUSALS: Final = (
    Rule(_is_another_choice, r"\boxed{A. B}", "B"),
    Rule(_has_another_domain, r"\boxed{x=k, k\in\mathbb{Z}}", r"x=k, k\in\mathbb{N}"),
    Rule(_is_another_half_of_a_day, r"\boxed{5\text{ p.m.}}", r"5\text{ a.m.}"),
)
#: Else an answer is correct, if one of them applies.
ACCEPTANCES: Final = (
    Rule(_has_a_decimal_comma, r"\boxed{3,5}", "3.5"),
    Rule(_is_spelled_alike, r"\boxed{5 \text{ of } 6}", r"5\text{ of }6"),
    Rule(_is_the_same_choice, r"\boxed{(C)\ 5}", "C"),
    Rule(_reads_the_same, r"\boxed{\frac{2}{4}}", "0.5"),
    Rule(_is_the_same_set, r"\boxed{x>2}", r"(2,\infty)"),
)

_HALF_OF_A_DAY = re.compile(r"\b([ap])(?:\\?\.)?\s?m\b", re.IGNORECASE)
#: A sum of letters, or lengths, areas and their ratios: "m + n", "|AB| + |CD|", "NO / BO".
_ASKS = (
    r"\s*(?:[a-zA-Z](?:\s*\+\s*[a-zA-Z])+|(?:[A-Z|+:/{}()\s-]|\\(?:[dt]?frac|cdot|times))+"
    r"|\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\\angle\s*)?(?:\\[a-z]+|[A-Z]+))\s*"
)


def _right_side(target: Answer) -> list[Answer]:
    """What a truth such as "NO / BO = 2" asks for: its right side, where the left one only names something."""
    left, _, right = target.text.partition("= ")
    if target.kind == RELATION and re.fullmatch("=(?: =)+", target.form):
        right = right.rpartition("= ")[2]  # a chain
    elif (
        target.kind != RELATION
        or target.form != "="
        or _is_assignment(target)
        or not re.fullmatch(_ASKS, re.sub(r"_\{[^{}]*\}", "", left))
    ):
        return []
    side = read(right)
    values = [_parsed(part.text) for part in (side.parts or (side,))]
    return [side] if all(value is not None and not value.free_symbols for value in values) else []


_MATRICES = re.compile(r"\\begin\{[pbB]?matrix\}.*\\end\{[pbB]?matrix\}", re.DOTALL)


def _computed(text: str) -> str:
    """A computation with matrices as the matrix that it gives; any other text as it is."""
    import sympy
    from math_verify import parser

    before, name, formula = text.rpartition("=")
    if not _MATRICES.search(formula) or re.search(r"\\(?:det|end\s*\{\w*\}\s*[,;])", formula):
        return text
    if _MATRICES.fullmatch(formula.strip()) and formula.count(r"\begin") == 1:
        return text
    try:
        matrix = parser.parse_latex_cached(_DECIMAL.sub(_as_fraction, formula)).doit()
        cells = matrix.as_explicit().tolist()
    except Exception:
        return text
    rows = r"\\".join("&".join(map(sympy.latex, row)) for row in cells)
    return f"{before}{name}\\begin{{pmatrix}}{rows}\\end{{pmatrix}}"


def _last_numbers(text: str) -> list[str]:
    """What math-verify finds in a text that names no answer, with the percent sign that it leaves out."""
    readings = [reading for reading in _parse_response(text.replace(r"\$", " ")) if isinstance(reading, str)]
    readings = [reading for reading in readings if "\\" not in reading or reading in text]  # not "\\\\le" as "\\le"
    readings = [reading for reading in readings if reading.count("{") == reading.count("}")]  # not a part of a formula
    relation = re.compile(r"(?:[<>≤≥≠]|\\(?:leq?|geq?|neq?))[\s$\\({]*\Z")
    sides = [(reading, text.rpartition(reading)) for reading in readings]
    readings = [
        reading
        for reading, (before, _, after) in sides
        if not (relation.search(before) or re.match(r"\s*[<>≤≥≠]", after))
    ]  # x < 5
    percent = re.compile(r"\s*(?:\\?%|per\s?cent)")
    return [f"{reading}%" if percent.match(text.rpartition(reading)[2]) else reading for reading in readings]


def _readable(answer: Answer) -> bool:
    if answer.kind == LEAF:
        return answer.text == "..." or based(answer.text) is not None or _parsed(answer.text) is not None
    return answer.kind != UNREAD and (answer.kind == RELATION or all(map(_readable, answer.parts)))


def _says(answer: Answer) -> bool:
    """Whether a sentence was read whole: a value, not words, and no relation of words around a formula."""
    if answer.kind in (UNREAD, WORDS):
        return False
    parts = answer.parts[1:] if _is_assignment(answer) else answer.parts
    return all(map(_says, parts)) and not (answer.kind == RELATION and "\x02" in answer.text and not answer.words)


def _is_assignment(answer: Answer) -> bool:
    return answer.kind == RELATION and answer.words != ""


def _value(answer: Answer) -> Answer:
    return answer.parts[1] if _is_assignment(answer) else answer


def same(target: Answer, answer: Answer, inside: bool = False) -> bool:
    """Whether two readings are one answer.

    Beside equal kinds these pairs count: an assignment and its value, a set of one element and its element, a list and
    a set, assignments and the tuple of their values, a residue and its number, an inequality and its solutions.
    """
    kinds = {target.kind, answer.kind}
    if target == answer:
        return True
    if (
        _is_assignment(target) != _is_assignment(answer)
        and kinds != {RELATION}
        and not any(map(_is_assignment, target.parts + answer.parts))
    ):
        return same(_value(target), _value(answer), inside)
    if kinds == {LEAF}:
        return _same_leaf(target, answer)
    if WORDS in kinds and kinds <= {WORDS, LEAF, REGION}:
        return _folded(target.text) == _folded(answer.text)
    if LIST in kinds:
        return _same_list(target, answer, inside)
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
        return same(modulus, other) and _equal(
            (_parsed(gold.text) - _parsed(value.text)) % _parsed(modulus.text), _parsed("0")
        )
    if number.kind != LEAF:
        return False
    if special.kind == RESIDUE:  # 9 mod 2 is not 9
        value, modulus = (_parsed(part.text) for part in special.parts)
        return value.is_number and bool(abs(value) < modulus) and same(special.parts[0], number)
    if special.form == ":" and len(special.parts) == 2:
        return same(Answer(LEAF, "/".join(part.text for part in special.parts)), number)
    return special.kind == RELATION and _computes(special) and same(special.parts[-1], number)


def _line(side: Answer) -> Answer:
    """A matrix of one row or one column as a tuple."""
    if side.form != "matrix" or (len(side.parts) > 1 and any(len(row.parts) > 1 for row in side.parts)):
        return side
    return Answer(TUPLE, parts=tuple(cell for row in side.parts for cell in row.parts), form="()")


def _same_ratio(target: Answer, answer: Answer) -> bool:
    """Whether 6 : 8 is 3 : 4."""
    sides = [[_parsed(part.text) for part in side.parts] for side in (target, answer)]
    if len(sides[0]) != len(sides[1]) or {None, 0} & {*sides[0], *sides[1]}:  # 12:00 is a time
        return _in_order(target.parts, answer.parts)
    return all(gold * sides[1][0] == value * sides[0][0] for gold, value in zip(*sides, strict=True))


def _has_solutions(target: Answer, answer: Answer) -> bool:
    """Whether the two are sets of numbers, such as intervals and inequalities."""

    def inequality(side: Answer) -> bool:
        parts = side.parts if side.kind == LIST else (side,)
        return all(
            part.kind == RELATION and part.parts and not re.search(r"=|\\(?:equiv|in)", part.form) for part in parts
        )

    sides = (target, answer)
    if {target.kind, answer.kind} == {REGION, LIST} and "{}" in (target.form, answer.form):
        return True
    return {target.kind, answer.kind} != {TUPLE} and all(
        side.kind in (REGION, TUPLE) or inequality(side) for side in sides
    )


def _variables(text: str) -> str:
    """The names of what an inequality is about; one in a set-builder is a dummy."""
    return "".join(sorted(set(re.findall("[a-zA-Z]", re.sub(r"\\\{.*|\\[a-zA-Z]+(?:\{[A-Z]\})?", "", text)))))


def _in_order(targets: Sequence[Answer], answers: Sequence[Answer]) -> bool:
    return len(targets) == len(answers) and all(same(*pair, True) for pair in zip(targets, answers, strict=True))


def _same_list(target: Answer, answer: Answer, inside: bool) -> bool:
    sides = (target, answer)
    if max(len(side.parts) for side in sides) > _MAX_ITEMS:
        raise Refused
    indexed = [any("_" in part.words for part in side.parts if _is_assignment(part)) for side in sides]
    if indexed == [False, True]:  # x_1 and x_2 of a truth without an index are two values of x
        answer = replace(
            answer,
            parts=tuple(
                replace(part, words=part.words.partition("_")[0]) if part.words else part for part in answer.parts
            ),
        )
        sides = (target, answer)
    # Values of several names have an order, which a tuple or a list without names has to have.
    named = sum(len({part.words for part in side.parts if _is_assignment(part)}) > 1 for side in sides)
    if {side.kind for side in sides} == {LIST, TUPLE} or named == 1:
        forms, of_truth = {target.form, answer.form}, any(map(_is_assignment, target.parts))
        labelled = any(_is_assignment(part) and part.parts[0].kind == WORDS for part in answer.parts)
        return (
            named == 1
            and not any(map(_out_of_order, sides))
            and (forms == {"", "()"} or (forms == {""} and (of_truth or labelled)))
            and _in_order(*(list(map(_value, side.parts)) for side in sides))
        )
    if any(part.text == "..." for side in sides for part in side.parts):
        return _in_order(target.parts, answer.parts)
    if inside and target.kind != answer.kind:
        return False
    targets, answers = (side.parts if side.kind == LIST else (side,) for side in sides)
    return all(any(same(t, a, True) for a in answers) for t in targets) and all(
        any(same(t, a, True) for t in targets) for a in answers
    )


def _out_of_order(side: Answer) -> bool:
    """Whether the named values of a list are of letters that follow each other, and stand in another order: y, x."""
    names = [part.words for part in side.parts if _is_assignment(part)]
    return names != sorted(names) and "".join(sorted(names)) in string.ascii_lowercase


def _folded(text: str) -> str:
    """Words without case, marks, plural s and FILLERS, and a phrase of PHRASES in its first wording.

    A single letter stays as it is.
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
    gold, value = (_parsed(side.text) for side in sides)
    if gold is None or value is None:
        return False
    if re.fullmatch(r"-?\d*\.\d+", answer.text) and len(re.sub(r"\A[-0.]+|\.", "", answer.text)) >= _DIGITS_OF_A_FLOAT:
        places = len(answer.text.partition(".")[2])  # what a program printed
        value = gold if gold.is_Rational and abs(gold - value) * 2 * sympy.Integer(10) ** places <= 1 else value
    of_gold, of_value = (unit(side.words) for side in sides)
    gold, value = gold * of_gold.scale, value * of_value.scale
    if of_gold.percent != of_value.percent and any(of.dimension or of.degrees for of in (of_gold, of_value)):
        return False
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


_DIGITS_OF_A_FLOAT = 15
_DECIMAL = re.compile(r"(?<!\d)(\d*)\.(\d+)")


def _as_fraction(decimal: re.Match[str]) -> str:
    return f"\\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}}"


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """The expression of a leaf, its decimals exact; None if it has a part that math-verify's parser does not read."""
    import sympy
    from math_verify import parser

    text = _DECIMAL.sub(_as_fraction, text)
    # The parser would leave these out, or multiply.
    if re.search(r"\d\s+\d|\d\s*_|'|\|\||\.", text):
        return None
    text = re.sub(r"(?<![\w}^_{\]])\{([^{}]*)\}|(?<!\\sqrt)\[([^\[\]]*)\]", lambda m: f"({m[1] or m[2]})", text)
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
        gold, value = _renamed(gold, value)
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


def _renamed(gold: Any, value: Any) -> tuple[Any, Any]:
    """Both with one name for the integer of a family: pi / 3 + 2 k pi and pi / 3 + 2 pi n."""
    import sympy

    names = [list(side.free_symbols) for side in (gold, value)]
    letters = {name.name for side in names for name in side}
    if list(map(len, names)) == [1, 1] and letters <= {"k", "l", "m", "n"} and gold.has(sympy.pi):
        return gold, value.subs(names[1][0], names[0][0])
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
    sides = [_parsed(side.text) for side in relation.parts]
    if not sides or any(side is None for side in sides):
        return None
    pairs = zip(relation.form.split(), itertools.pairwise(sides), strict=True)
    return [(sign, left - right) for sign, (left, right) in pairs]


def _same_relation(target: Answer, answer: Answer) -> bool:
    """Relations whose sides differ by a constant factor; by a function for an assignment of the same name."""
    if _is_assignment(target) and target.words == answer.words and same(_value(target), _value(answer)):
        return True
    if _is_assignment(target) and _is_assignment(answer):
        one, other = (re.fullmatch(r"([a-zA-Z])\(([a-zA-Z])\)", side.words) for side in (target, answer))
        if (one or other) and "y" in (target.words, answer.words):  # y = 3 x of f(x) = 3 x
            return same(_value(target), _value(answer))
        if one and other and one[1] == other[1] and one[2] != other[2]:
            gold, value = (_parsed(_value(side).text) for side in (target, answer))
            if gold is None or value is None:
                return False
            names = {name.name: name for side in (gold, value) for name in side.free_symbols}
            renamed = [names.get(function[2]) for function in (one, other)]
            return _equal(gold, value if None in renamed else value.subs(renamed[1], renamed[0]))
    left, right = _steps(target), _steps(answer)
    if left is None or right is None or len(left) != len(right):
        return re.sub(r"\s", "", target.text) == re.sub(r"\s", "", answer.text)
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
    """Whether it is a computation, such as 256 + 37 = 293 or m + n = 256 + 37 = 293."""
    sides = [_parsed(side.text) for side in relation.parts]
    closed = [side is not None and not side.free_symbols for side in sides]
    if not sides or set(relation.form.split()) != {"="} or not all(closed[1:]) or (not closed[0] and len(sides) < 3):
        return False
    return all(_equal(*pair) for pair in itertools.pairwise(sides[0 if closed[0] else 1 :]))


# Parsed and compared once before the first fork, so that every worker starts with SymPy's and ANTLR's caches filled
# (the first polynomial comparison of a fresh process takes 0.3 s, the next ones 10 ms).
_WARM_UP = r"""
34|35  \frac{3}{8}|0.375  2\sqrt{3}|\sqrt{12}  x^2+3x+2|(x+1)(x+3)  [1,5)|(1,5]  \frac{3\pi}{4}|\frac{\pi}{3}
(2,-3)|\left(3,\frac{\pi}{2}\right)  \left\{1,2,3\right\}|3,2,1  \sin^2 x+\cos^2 x|1  50\%|\text{half}
\begin{pmatrix}1\\2\end{pmatrix}|\begin{pmatrix}1\\3\end{pmatrix}  e^{i\pi}+\log_2 8|2  \binom{5}{2}+4!|34
(-\infty,2)\cup(3,\infty)|x<2 \text{ or } x>3  x \leq 3|3 \geq x"""


def warm_up() -> None:
    """Enlarge math-verify's cache of parsed expressions (20 by default) and fill all caches."""
    from math_verify import parser

    parser.parse_latex_cached = functools.lru_cache(maxsize=4096)(parser.parse_latex_cached.__wrapped__)
    for pair in re.split(r"\s{2,}|\n", _WARM_UP.strip()):
        answer, _, truth = pair.partition("|")
        judge(f"\\boxed{{{answer}}}", truth, True)
    judge("The answer is 12.", "13", True)
