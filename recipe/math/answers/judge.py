"""Whether an answer is the ground truth: shapes by their parts, numbers exactly, everything else by math-verify.

Only worker processes import this module.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any, Final

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from recipe.math.answers.spelling import closing, folded, has_words, spelled, split, stripped, without_unit
from recipe.math.answers.verdict import Status

#: An answer beyond them is refused before anything is evaluated.
MAX_CHARS, MAX_NESTING = 400, 8
#: Powers of powers, exponents of five digits, factorials of four, factorials of factorials, large binomials.
_HUGE: Final = re.compile(
    r"\^[\s{(]*-?\w+[\s})]*\^[\s{(]*-?\w{2}|\d{2}\}?[\s)]+\^[\s{(]*\d{3}|\^[\s{(]*-?\d{5}|\d{4}[\s)}]*!|!\s*\)*\s*!"
    r"|\d{5}\}?\{\d{3}"
)
#: LaTeX as it is written, and whole. By default math-verify drops letters that may be units, so that 7t is 7, and reads
#: a fraction of what it cannot parse.
_AS_WRITTEN: Final = LatexExtractionConfig(normalization_config=NormalizationConfig())
_WHOLE: Final = {"extraction_config": (_AS_WRITTEN,), "extraction_mode": "first_match", "fallback_mode": "no_fallback"}
_verified: Final = functools.partial(
    verify, float_rounding=12, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
)
#: What is not read. math-verify drops many commands in silence, so only these are an expression's.
_UNREAD: Final = re.compile(
    r"[\d}]\s+\{?\d|\d\s*[_{]|\.\.|[?:&#'@\"]|[^\x00-\x7f]|\\\Z|\\(?!(?:frac|binom|sqrt|pi|infty|cdot|times|div|pm|circ"
    r"|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp|min|max|gcd|lcm|[lr](?:floor|ceil|vert)|vert|cup|cap|setminus"
    r"|emptyset|mathbb|in|le|ge|lt|gt|ne|begin|end|alpha|beta|[gG]amma|[dD]elta|(?:var)?epsilon|zeta|eta"
    r"|[tT]heta|kappa|[lL]ambda|mu|nu|xi|rho|[sS]igma|tau|(?:var)?phi|Phi|chi|[pP]si|[oO]mega)(?![a-zA-Z]))[a-zA-Z]"
)
_RELATION: Final = r"\\(?:le|ge|ne|in)(?![a-zA-Z])|[=<>]"
#: What only inequalities and sets of numbers have.
_REGION: Final = re.compile(r"\\(?:le|ge|ne|cup|cap|setminus|mathbb|emptyset)(?![a-zA-Z])|[<>]")
#: What an answer may call its value: x_1, \theta, f(2), \angle ABC, |AB|, (x,y), \text{Area}.
_NAME: Final = re.compile(
    r"(?:\\(?:angle|triangle|overline)\s*)?\{?\|?[a-zA-Z]{1,4}\|?\}?'*(?:_\{\w+\})?(?:\([^()]*\))?"
    r"|\\(?!not|neg)[a-zA-Z]+(?:_\{\w+\})?|\\text\{[^{}]*\}|\([a-zA-Z](?:,\s*\\?[a-zA-Z]+)+\)"
)
#: The same of an answer alone, since as a truth it is an equation of several letters: m+n, abc.
_SUM: Final = re.compile(r"[a-zA-Z](?:_\{\w+\})?(?:\s*[+-]?\s*[a-zA-Z](?:_\{\w+\})?)+")
_RATIONAL: Final = re.compile(r"-?(?:\d*\.?\d+(?:/\d+)?|\\frac\{\d+\}\{\d+\})")
_DECIMAL: Final = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_MATRIX: Final = re.compile(r"\\begin\{[pb]?matrix\}((?:(?!\\begin).)*)\\end\{[pb]?matrix\}", re.DOTALL)
_LABEL: Final = re.compile(r"\A\(?(?:\\text\{)?\(?[A-Z]\s*\)\s*\}?[\s.:]*(?=\S)|\A[A-Z][.:]\s+(?=\S)")


class UnreadError(Exception):
    """A text that is not read whole."""


def judge(answer: str, truth: str) -> Status:
    """The verdict on the text of an answer."""
    if len(answer) > MAX_CHARS:
        return Status.CORRECT if answer == truth else Status.REFUSED
    answer, truth = spelled(answer), spelled(truth)
    if not answer or _compact(answer) == _compact(truth):
        return Status.CORRECT if answer else Status.NO_ANSWER
    brackets = (1 if sign in "{([" else -1 for sign in answer if sign in "{}()[]")
    if max(itertools.accumulate(brackets), default=0) > MAX_NESTING or _HUGE.search(answer):
        return Status.REFUSED
    try:
        letter = _choice(truth)  # else of "(C) 12" the text
        is_equal = _choice(answer) == letter if letter else same(truth, _LABEL.sub("", answer))
        return Status.CORRECT if is_equal else Status.WRONG
    except MemoryError:  # the worker is replaced
        return Status.CRASHED
    except Exception as error:  # of SymPy or math-verify
        return Status.BAD_TRUTH if isinstance(error, UnreadError) and str(error) in truth else Status.PARSE_FAILED


def _compact(text: str) -> str:
    return re.sub(r"(?<!\d)\s|\s(?!\d)", "", text)


def _choice(text: str) -> str:
    r"""The letter of a choice: B, (B), \text{(B)}, option B; or with its text behind it, "(B) 12"."""
    plain = re.sub(r"\\text\{|[{}]", " ", text).strip()
    match = re.fullmatch(r"(?:(?:[Oo]ption|[Cc]hoice)\s)?\s*\(?\s*([A-Z])\s*\)?[.:]?", plain)
    match = match or re.match(r"(?:\(([A-Z])\)(?!\s*[-+*/^_!='(]|\s*\\c)|([A-Z])[.):]\s)(?!.*\b[A-Z]\b)", plain)
    return next(filter(None, match.groups()), "") if match else ""


def same(truth: str, answer: str) -> bool:
    """Whether two texts are one answer: a set or list in any order, a tuple, interval or matrix by its cells.

    Raises UnreadError if one of them is not read whole.
    """
    truth, answer = stripped(truth), stripped(answer)
    truth, answer = _value(truth, answer, (_NAME,)), _value(answer, truth, (_NAME, _SUM))
    if not answer or _compact(truth) == _compact(answer):
        return bool(answer)
    if (_REGION.search(truth) or _REGION.search(answer)) and not has_words(truth + answer):
        (one, names), (two, others) = _as_set(truth), _as_set(answer)
        is_same = one is not None and (one == two or (type(one) is type(two) and bool(_verified(one, two))))
        return is_same and (names == others or not (names and others))
    (shape, ours), (other, theirs) = _cells(truth), _cells(answer)
    if shape != other and not ("()" in (shape, other) and "1" in (shape + other).strip("()").split("x")):
        return False  # but a vector may be a tuple
    if shape == "one":
        return _same_leaf(truth, answer)
    if shape == "set":
        equal = [[same(one, two) for two in theirs] for one in ours]
        return all(map(any, equal)) and all(map(any, zip(*equal, strict=True)))
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def _cells(text: str) -> tuple[str, list[str]]:
    """The shape of a text, "()", "[)" and so on, "2x3" of a matrix, "set" of a list, or "one"; and its parts."""
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[1].strip().removesuffix("\\\\").split("\\\\")]
        return f"{len(rows)}x{len(rows[0])}", [cell for row in rows for cell in row]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and closing(text, 0) == len(text) - 1:
        return text[0] + text[-1], split(text[1:-1])
    inside = re.fullmatch(r"\\\{(.*)\\\}", text, re.DOTALL)
    parts = [part for part in split(inside[1] if inside else text) if part.strip()]
    names = {re.sub(r"_\{\w+\}", "", part.partition("=")[0]).strip() for part in parts}
    if len(names) > 1 and all("=" in part for part in parts):  # y=2, x=1 is (1, 2), but x_1=1, x_2=2 a list
        return "()" if len(names) == len(parts) else "mixed", sorted(parts, key=str.strip)
    both = [part.replace(r"\pm", sign) for part in parts for sign in ("+-" if r"\pm" in part else " ")]
    return "set" if inside or len(both) > 1 else "one", both


def _value(text: str, other: str, names: tuple[re.Pattern[str], ...]) -> str:
    """What "x = 5" or "m + n = 3 + 2 = 5" says, beside a text that is no relation or names the same; else the text."""
    name, *values = map(stripped, split(text, _RELATION))
    others = [stripped(part) for part in split(other, _RELATION)]
    signs = set(re.findall(_RELATION, text))
    is_relation = len(others) > 1 and others[0] != name and "=" in signs
    if is_relation or len(split(text)) > 1 or signs not in ({"="}, {r"\in"}):
        return text
    if not any(form.fullmatch(name) for form in names):
        if len(others) > 1 or re.search("[a-zA-Z]", re.sub(r"\\[a-z]+", "", name)):
            return text
        values = [name, *values]  # 30/6 = 5
    if not all(_same_leaf(values[-1], value) for value in values[:-1]):
        raise UnreadError(text)  # x = 9 = 8
    return values[-1]


def _as_set(text: str) -> tuple[Any, set[Any]]:
    """The numbers of an interval, or of inequalities that all hold, or of which any does; None of a number; names."""
    parts = [parsed(part) for part in split(text)]
    if not all(hasattr(part, "as_set") or isinstance(part, sympy.Set) for part in parts):
        return None, set()
    names = set().union(*(part.free_symbols for part in parts))
    if len(names) > 1:
        return (parts[0].canonical if len(parts) == 1 else None), names  # x + y > 2; not x > 1, y < 2
    sets = [part if isinstance(part, sympy.Set) else part.as_set() for part in parts]
    both = sympy.Intersection(*sets)
    return sympy.Union(*sets) if ";" in text or both is sympy.S.EmptySet else both, names


def _same_leaf(truth: str, answer: str) -> bool:
    """Whether one number, expression, equation or word is another."""
    (truth, unit), (answer, other) = without_unit(truth), without_unit(answer)
    if unit and other and (unit[0] != other[0] or re.sub(r"\D", "", unit) != re.sub(r"\D", "", other)):
        return False
    percents = [side.endswith("%") for side in (truth, answer)]
    truth, answer = (side.removesuffix("%").strip() for side in (truth, answer))
    if has_words(truth) or has_words(answer):
        return folded(truth) == folded(answer) != ""
    if re.search(r"\d\s*[)}]?\s*_|\d\s*:", truth + answer):  # of another base, or a ratio
        return _compact(truth) == _compact(answer)
    if ("=" in answer) != ("=" in truth):
        return False
    gold, value = parsed(truth), parsed(answer)
    if percents == [False, True]:
        return _equal(gold, value / 100) or (bool(abs(gold) > 1) and _equal(gold, value))
    return _equal(gold, value) or (percents == [True, False] and _equal(gold / 100, value))


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """The expression that math-verify reads in the whole of a text, its decimals as fractions, i as a number.

    Raises UnreadError if it reads nothing, or not the whole.
    """
    if _RATIONAL.fullmatch(text):
        return sympy.Rational(text.replace("}{", "/").replace("\\frac{", "").rstrip("}"))
    exact = _DECIMAL.sub(lambda match: rf"\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}", text)
    found = [] if _UNREAD.search(text) else parse(f"\\boxed{{{exact}}}", **_WHOLE, parsing_timeout=None)
    if not found:
        raise UnreadError(text)
    names = {name.name: name for name in getattr(found[0], "free_symbols", ())}
    return found[0].subs(names["i"], sympy.I) if names.keys() == {"i"} else found[0]


def _equal(gold: Any, value: Any) -> bool:
    """Closed expressions by their exact values, equations by their ratio, others by math-verify."""
    equations = [side for side in (gold, value) if isinstance(side, sympy.Eq)]
    if len(equations) == 2:
        zeros = [sympy.together(side.lhs - side.rhs).as_numer_denom()[0] for side in equations]
        ratio = sympy.simplify(zeros[0] / zeros[1])
        return bool(zeros[0].free_symbols and ratio.is_number and ratio.is_finite and ratio != 0)
    if not all(isinstance(side, sympy.Expr) and not side.free_symbols for side in (gold, value)):
        return bool(_verified(gold, value))
    gold, value = gold.doit(), value.doit()
    if gold == value or (gold.is_Rational and value.is_Rational) or not (gold.is_finite and value.is_finite):
        return bool(gold == value)
    largest = max(abs(sympy.N(gold, 30)), abs(sympy.N(value, 30)))
    return bool(abs(sympy.N(gold - value, 60, maxn=400)) <= largest * sympy.Float("1e-50"))
