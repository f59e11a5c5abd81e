"""One verdict on a response, with the reason: by the kinds of answer and truth, and by math-verify itself."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from fspo.rewards.extraction import answer_texts
from fspo.rewards.limits import MAX_EXPRESSION_CHARS, Refused
from fspo.rewards.reading import (
    _CONNECTING,
    _DOMAIN,
    _SCALES,
    LEAF,
    LIST,
    MATRIX,
    RATIO,
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
)
from fspo.rewards.verdict import Status

_MAX_ITEMS = 30


def judge(part: str | None, response: str, truth: str, normalise: bool) -> tuple[Status, Status, bool]:
    r"""The verdict, math-verify's own, and whether both depend on `part` and `truth` alone (and may be cached).

    Args:
        part: the decisive part of the response if `extraction.decisive_part` found one, else None.
        response: the whole response, used when there is no such part or math-verify can read nothing from it.
        truth: the ground truth.
        normalise: False makes math-verify's verdict the first one, too.
    """
    plain, cacheable = _plain(part, response, truth)
    if not normalise:
        return plain, plain, cacheable
    text = part if part is not None else response
    try:
        return by_kind(text, truth), plain, cacheable
    except Refused:
        return Status.REFUSED, plain, cacheable
    except Exception:
        return Status.COMPARE_FAILED, plain, cacheable


# ---------------------------------------------------------------- math-verify's own verdict


def _plain(part: str | None, response: str, truth: str) -> tuple[Status, bool]:
    """As math-verify with the targets of verl 0.9.1's `math_verify` scorer; a match of any pair of readings counts.

    Exceptions become statuses: running out of memory or recursion is a failed comparison, a limit of `limits` REFUSED.
    """
    try:
        gold = _parse_truth(truth)
    except (Exception, Refused):
        gold = ()
    if not gold:
        return Status.BAD_TRUTH, True
    if part is not None:
        status = _judge_text(part, gold)
        if status not in (Status.NO_ANSWER, Status.PARSE_FAILED):
            return status, True
    return _judge_text(response, gold), False


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
    """Whether the answer of a text is the truth: of the same kind, or of one of the pairs in :func:`same`."""
    target_text = next(iter(answer_texts(truth)), truth)
    texts = answer_texts(text) or _last_numbers(text)
    if not texts:
        return Status.NO_ANSWER
    if len(target_text) > MAX_EXPRESSION_CHARS or len(texts[0]) > MAX_EXPRESSION_CHARS:
        return Status.CORRECT if texts[0].strip() == truth.strip() else Status.REFUSED
    target_text, answers = cleaned(target_text), [cleaned(text) for text in texts if len(text) <= MAX_EXPRESSION_CHARS]
    if not target_text:
        return Status.BAD_TRUTH
    if _compact(target_text) == _compact(answers[0]):
        return Status.CORRECT
    if (letters := choice(target_text)) and (chosen := choice(answers[0], with_text=True)):
        return Status.CORRECT if letters == chosen else Status.WRONG
    domains = [
        re.sub(r"[\s{}.)]", "", domain[1]) for text in (target_text, answers[0]) if (domain := _DOMAIN.search(text))
    ]
    if len(set(domains)) > 1:
        return Status.WRONG
    target = read(target_text)
    if not _readable(target):
        return Status.BAD_TRUTH
    # All boxes are the answer only where the truth is a list.
    readings = [read(answer) for answer in (answers if target.kind == LIST else answers[:1])]
    if (
        choice(answers[0], with_text=True)
        and (rest := re.sub(r"\A\(?\x02?[A-Z][).:]+\s*", "", answers[0])) != answers[0]
    ):
        readings.append(read(rest))
    readable = [answer for answer in readings if _readable(answer)]
    if any(same(target, answer) for answer in readable):
        return Status.CORRECT
    if readable and _has_solutions(target, readable[0]):
        return _solutions(truth, texts[0])
    return Status.WRONG if readable else Status.PARSE_FAILED


def _last_numbers(text: str) -> list[str]:
    """What math-verify finds in a text that names no answer, with the percent sign that it leaves out."""
    readings = [reading for reading in _parse_response(text) if isinstance(reading, str)]
    percent = re.compile(r"\s*(?:\\?%|per\s?cent)")
    return [f"{reading}%" if percent.match(text.rpartition(reading)[2]) else reading for reading in readings]


def _compact(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _readable(answer: Answer) -> bool:
    if answer.kind == LEAF:
        return answer.text == "..." or based(answer.text) is not None or _parsed(answer.text) is not None
    return answer.kind != UNREAD and all(map(_readable, answer.parts if answer.kind != RELATION else ()))


def _is_assignment(answer: Answer) -> bool:
    return answer.kind == RELATION and len(answer.parts) == 1


def same(target: Answer, answer: Answer, inside: bool = False) -> bool:
    """Whether two readings are one answer.

    Beside equal kinds these pairs count: an assignment and its value, a set of one element and its element, a list and
    a set, assignments and the tuple of their values, a residue and its number, an inequality and its solutions.
    """
    kinds = {target.kind, answer.kind}
    if target == answer:
        return True
    if _is_assignment(target) != _is_assignment(answer) and kinds != {RELATION}:
        values = [side.parts[-1] if _is_assignment(side) else side for side in (target, answer)]
        if not kinds & {LIST, TUPLE} or not (set(map(_is_assignment, (*target.parts, *answer.parts))) - {False}):
            return same(values[0], values[1], inside)
    if kinds == {LEAF}:
        return _same_leaf(target, answer)
    if kinds <= {WORDS, LEAF}:
        return _folded(target.text) == _folded(answer.text)
    if LIST in kinds:
        return _same_list(target, answer, inside)
    if kinds == {MATRIX} or kinds == {TUPLE} or kinds == {RATIO}:
        return target.form == answer.form and _in_order(target.parts, answer.parts)
    if kinds == {RATIO, LEAF}:
        ratio, number = (target, answer) if target.kind == RATIO else (answer, target)
        return len(ratio.parts) == 2 and same(Answer(LEAF, "/".join(part.text for part in ratio.parts)), number)
    if RESIDUE in kinds and kinds <= {RESIDUE, LEAF}:
        return _same_residue(target, answer)
    if kinds == {RELATION}:
        return _same_relation(target, answer)
    if kinds == {RELATION, LEAF}:
        relation, number = (target, answer) if target.kind == RELATION else (answer, target)
        return _computes(relation) and same(relation.parts[-1], number)
    return False


def _has_solutions(target: Answer, answer: Answer) -> bool:
    """Whether the two are sets of numbers, such as intervals and inequalities, that math-verify has to compare."""

    def inequality(side: Answer) -> bool:
        parts = side.parts if side.kind == LIST else (side,)
        return all(
            part.kind == RELATION and not re.search(r"=|\\(?:equiv|in)", part.form) and part.form != part.text
            for part in parts
        )

    sides = (target, answer)
    if {target.kind, answer.kind} == {REGION, LIST} and "{}" in (target.form, answer.form):
        return True
    return all(side.kind in (REGION, TUPLE) or inequality(side) for side in sides) and not all(
        side.kind == TUPLE for side in sides
    )


def _solutions(truth: str, answer: str) -> Status:
    sides = [
        re.sub(r"(?<!\d)(\d*)\.(\d+)", lambda m: f"\\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
        for text in (answer, truth)
    ]
    status = _judge_text(f"\\boxed{{{sides[0]}}}", _parse_truth(sides[1]))
    if status is Status.CORRECT:
        return status
    # math-verify takes an interval for an inequality, not the other way round.
    return _judge_text(f"\\boxed{{{sides[1]}}}", _parse_truth(sides[0]))


def _in_order(targets: Sequence[Answer], answers: Sequence[Answer]) -> bool:
    return len(targets) == len(answers) and all(same(*pair, True) for pair in zip(targets, answers, strict=True))


def _same_list(target: Answer, answer: Answer, inside: bool) -> bool:
    if max(len(target.parts), len(answer.parts)) > _MAX_ITEMS:
        raise Refused
    ordered = [side for side in (target, answer) if len({part.form for part in side.parts if _is_assignment(part)}) > 1]
    if {target.kind, answer.kind} == {LIST, TUPLE}:
        return bool(ordered) and _in_order(*(_values(side) for side in (target, answer)))
    if len(ordered) == 1:
        return _in_order(*(_values(side) for side in (target, answer)))
    if any(part.text == "..." for part in (*target.parts, *answer.parts)):
        return _in_order(target.parts, answer.parts)
    parts = [side.parts if side.kind == LIST else (side,) for side in (target, answer)]
    if inside and target.kind != answer.kind:
        return False
    return all(any(same(t, a, True) for a in parts[1]) for t in parts[0]) and all(
        any(same(t, a, True) for t in parts[0]) for a in parts[1]
    )


def _values(side: Answer) -> list[Answer]:
    return [part.parts[-1] if _is_assignment(part) else part for part in side.parts]


def _folded(text: str) -> str:
    words = re.findall(r"[^\W_]+|[^\w\s]", re.sub(r"[\x02{}().,'\s-]+", " ", text))
    return (
        " ".join(word for word in words if not re.fullmatch(_CONNECTING, word.lower())).lower()
        if len(text) > 1
        else text
    )


def _units(words: str) -> tuple[int, bool, str]:
    """What a number with these words beside it is multiplied by, whether it is a percentage, and what is left."""
    scale, percent, rest = 1, False, []
    for word in words.split():
        if (factor := _SCALES.get(word if len(word) == 1 else word.lower().rstrip("s"))) is not None:
            scale *= factor
        elif word == "percent":
            percent = True
        elif word not in ("degrees", "degree", "deg", "points") and not re.fullmatch(_CONNECTING, word.lower()):
            rest.append(re.sub(r"[{}]", "", word).lower().rstrip("s"))
    return scale, percent, " ".join(rest)


def _same_leaf(target: Answer, answer: Answer) -> bool:
    import sympy

    bases = [based(side.text) for side in (target, answer)]
    if any(bases):
        (value, base), (other, other_base) = (
            own or (_integer(side.text), 10) for own, side in zip(bases, (target, answer), strict=True)
        )
        return value is not None and (value, base) == (other, other_base)
    if (
        target.words == answer.words
        and re.fullmatch("[a-zA-Z]+", target.text)
        and re.fullmatch("[a-zA-Z]+", answer.text)
    ):
        return (_folded if len(target.text) > 1 else str)(target.text) == (_folded if len(answer.text) > 1 else str)(
            answer.text
        )
    gold, value = _parsed(target.text), _parsed(answer.text)
    if gold is None or value is None:
        return False
    (scale, percent, unit), (scale_a, percent_a, unit_a) = _units(target.words), _units(answer.words)
    if unit and unit_a and unit != unit_a:
        return False
    gold, value = gold * scale, value * scale_a
    degrees = ["degrees" in side.words for side in (target, answer)]
    if degrees[0] != degrees[1] and (gold if degrees[1] else value).has(sympy.pi):
        gold, value = (
            side * sympy.pi / 180 if is_degrees else side
            for side, is_degrees in zip((gold, value), degrees, strict=True)
        )
    if percent == percent_a:
        return _equal(gold, value)
    if not (gold.is_number and value.is_number):
        return False
    if percent:
        return _equal(gold, value) or _equal(gold / 100, value)
    return _equal(gold, value / 100) or (bool(gold.is_number and abs(gold) > 1) and _equal(gold, value))


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,30}", text) else None


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """The expression of a leaf, its decimals exact; None if it has a part that math-verify's parser does not read."""
    import sympy
    from math_verify import parser

    text = text.replace("\x02", "")
    text = re.sub(r"_(\w)", r"_{\1}", text)
    if re.search(r"\d\s+\.?\d|\d\s*_|''|'\s*\Z|\|\||\.\.\.", text):
        return None
    text = re.sub(r"(?<!\d)(\d*)\.(\d+)", lambda m: f"\\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    text = re.sub(r"(?<![\w}^_{\]])\{([^{}]*)\}", r"(\1)", text)
    text = re.sub(r"(?<!\\sqrt)\[([^\[\]]*)\]", r"(\1)", text)
    if "." in text:
        return None
    try:
        expression = parser.parse_latex_cached(text)
    except Exception:
        return None
    if not isinstance(expression, sympy.Expr) or expression.has(sympy.Derivative):
        return None
    return (
        expression.subs({symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"})
        if {symbol.name for symbol in expression.free_symbols} == {"i"}
        else expression
    )


def _equal(gold: Any, value: Any) -> bool:
    """Closed expressions by their exact values, others by math-verify."""
    import sympy
    from math_verify import verify

    if gold.free_symbols or value.free_symbols:
        if _apart(gold, value):
            return False
        return bool(verify(gold, value, timeout_seconds=None, raise_on_error=True))
    gold, value = (side.doit() for side in (gold, value))
    if (gold.is_Rational and value.is_Rational) or gold == value:
        return bool(gold == value)
    if not (gold.is_finite and value.is_finite):
        return False
    difference = abs(sympy.N(gold - value, 60, maxn=400))
    largest = max(abs(sympy.N(gold, 30)), abs(sympy.N(value, 30)))
    return bool(difference <= largest * sympy.Float("1e-50")) if difference.is_number else False


def _endless(sympy: Any) -> tuple[Any, ...]:
    """What takes long to evaluate or to simplify."""
    return sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit


def _apart(one: Any, other: Any) -> bool:
    """Whether two expressions have clearly different values at some point: sparing what would take long to simplify."""
    import sympy

    if one.has(*_endless(sympy)) or other.has(*_endless(sympy)):
        return False
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    point = {symbol: sympy.Rational(3 * number + 7, 5) for number, symbol in enumerate(symbols)}
    try:
        values = [complex(sympy.N(side.subs(point), 15)) for side in (one, other)]
    except Exception:  # a function without a name that SymPy knows, a sum that does not converge
        return False
    return abs(values[0] - values[1]) > 1e-6 * max(map(abs, values))


def _same_residue(target: Answer, answer: Answer) -> bool:
    if target.kind == answer.kind:
        (gold, modulus), (value, other) = target.parts, answer.parts
        return same(modulus, other) and _equal(
            (_parsed(gold.text) - _parsed(value.text)) % _parsed(modulus.text), _parsed("0")
        )
    residue, number = (target, answer) if target.kind == RESIDUE else (answer, target)
    return same(residue.parts[0], number)


_FLIPPED = {">": "<", "\\ge": "\\le", "\\gg": "\\ll"}


def _steps(relation: Answer) -> list[tuple[str, Any]] | None:
    """Its neighbouring sides as (sign, left minus right), > turned into <; None where a side is not an expression."""
    pieces = re.split(r"(\\(?:le|ge|ne|ll|gg)(?![a-zA-Z])|[=<>])", relation.text)
    sides = [_parsed(side.strip()) for side in pieces[::2]]
    if any(side is None for side in sides):
        return None
    steps = []
    for left, sign, right in zip(sides, pieces[1::2], sides[1:], strict=False):
        steps.append((_FLIPPED[sign], right - left) if sign in _FLIPPED else (sign, left - right))
    return steps


def _same_relation(target: Answer, answer: Answer) -> bool:
    """Relations whose sides differ by a constant factor; by a function for an assignment of the same name."""
    if _is_assignment(target) and target.form == answer.form and same(target.parts[-1], answer.parts[-1]):
        return True
    left, right = _steps(target), _steps(answer)
    if left is None or right is None or len(left) != len(right):
        return re.sub(r"\s", "", target.text) == re.sub(r"\s", "", answer.text)
    return all(any(_same_step(one, other) for other in right) for one in left)


def _same_step(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    import sympy

    if one[0] != other[0] or other[1] == 0:
        return False
    sides = [one[1], other[1]]
    if any(side.has(*_endless(sympy)) for side in sides):
        return bool(sides[0] == sides[1])
    if one[0] == "=":  # y / x = 2 and y = 2 x
        sides = [sympy.together(side).as_numer_denom()[0] for side in sides]
    ratio = sides[0] / sides[1]
    shifted = {symbol: symbol + 1 for symbol in ratio.free_symbols}
    if _apart(ratio, ratio.subs(shifted, simultaneous=True)):
        return False
    ratio = sympy.simplify(ratio)
    return not ratio.free_symbols and bool(ratio != 0) and (one[0] in ("=", "\\ne") or bool(ratio > 0))


def _computes(relation: Answer) -> bool:
    """Whether it is a computation, such as 256 + 37 = 293 or m + n = 256 + 37 = 293."""
    if set(relation.form.split()) != {"="}:
        return False
    sides = [_parsed(side.text) for side in relation.parts]
    closed = [side is not None and not side.free_symbols for side in sides]
    if not all(closed[1:]) or (not closed[0] and len(sides) < 3):
        return False
    return all(_equal(*pair) for pair in itertools.pairwise(sides[0 if closed[0] else 1 :]))


# Parsed and compared once before the first fork, so that every worker starts with SymPy's and ANTLR's caches filled
# (the first polynomial comparison of a fresh process takes 0.3 s, the next ones 10 ms).
_WARM_UP = (
    ("34", "35"),
    (r"\frac{3}{8}", "0.375"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("x^2+3x+2", "(x+1)(x+3)"),
    ("[1,5)", "(1,5]"),
    ("(2,-3)", r"\left(3,\frac{\pi}{2}\right)"),
    (r"\frac{3\pi}{4}", r"\frac{\pi}{3}"),
    (r"\left\{1,2,3\right\}", "3,2,1"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"x \leq 3", r"3 \geq x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"e^{i\pi}+\log_2 8", "2"),
    (r"50\%", r"\text{half}"),
    (r"\binom{5}{2}+4!", "34"),
    (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
)


def warm_up() -> None:
    """Enlarge math-verify's cache of parsed expressions (20 by default) and fill all caches."""
    from math_verify import parser

    parser.parse_latex_cached = functools.lru_cache(maxsize=4096)(parser.parse_latex_cached.__wrapped__)
    for answer, truth in _WARM_UP:
        judge(f"\\boxed{{{answer}}}", "", truth, True)
    judge(None, "The answer is 12.", "13", True)
