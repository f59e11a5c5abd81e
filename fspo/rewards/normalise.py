r"""Rewrites answers that math-verify cannot read or misreads, before it judges them.

The rules work on text: they change how an answer is written, and math-verify says whether it is right. A rule is here
because leaving it out makes verdicts on the dev part of the labelled pairs worse, and because it spoils none of them
(docs/data-and-rewards.md). `judge` compares a rewritten pair with `exact=True`, which needs parsed expressions: a
decimal against an irrational number, and the imaginary unit.
"""

from __future__ import annotations

import re
from fractions import Fraction

from fspo.rewards.extraction import boxed_content, closing_brace
from fspo.rewards.limits import MAX_EXPRESSION_CHARS

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Between boxes that together are one answer: "2" and "3", or x = 2 or x = 3.
_JOINED = re.compile(r"(?:[\s,;$.]|\\[,;]|\\quad|\\qquad|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\\\(|\\\))*")

_STYLE = re.compile(r"\\(?:underline|emph|uline|bm|boldsymbol|text(?:tt|sf|sl|sc|up)|color\s*\{\w+\})\s*(?=\{)")
_AROUND = re.compile(r"\$([^$]+)\$|\\\((.+)\\\)|\*{1,2}([^*]+)\*{1,2}|`([^`]+)`|<\w+>([^<]+)</\w+>", re.DOTALL)
_START = re.compile(r"\A(?:[\s=:~]|\\[ ,;:!])+")
_END = re.compile(r"(?:[\s,;:~]|(?<![.])[.](?![.])|\\[ ,;:!]|\\\\|\\q?quad(?![a-zA-Z])|\\text\s*\{[\s.,;:]*\}|\\\Z)+\Z")

_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_NUMBER = re.compile(r"-?(?:\d{1,12}(?:/\d{1,6})?|\d{0,12}\.\d{1,12})")
_LOOSE_SPACES = re.compile(r"(?<![\d ]) +| +(?![\d ])")  # one between two digits may separate two numbers
_PERCENT = re.compile(
    r"(?:\\text\s*\{\s*)?(?P<value>[^{}%\\]*(?:\\[dt]?frac[{}\d]*)?)(?:\s|\\[ ,;!]|~|\})*"
    r"(?:\\?%|\\text\s*\{\s*(?:\\?%|per\s?cent)\s*\}|per\s?cent)\s*\}?"
)

_DEGREES = re.compile(
    r"(?P<function>\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d+\}?)?)\s*(?P<open>\(|\\left\(|\{)?\s*"
    r"(?P<angle>-?\d{1,4}(?:\.\d{1,4})?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*(?P<close>\\right\)|\)|\})?"
)
_REPEATING = re.compile(r"(?<![\d.])(\d{1,6})\.(\d{0,6})\\overline\s*\{?(\d{1,6})\}?(?!\d)")
_DECIMAL = re.compile(r"\.\d")
_IRRATIONAL = re.compile(r"\\(?:sqrt|pi|ln|log|sin|cos|tan|cot|sec|csc|arc\w+)|(?<![a-zA-Z\\])e(?![a-zA-Z])|\^")
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])|\\sqrt\s*\{\s*-")


def normalised(part: str | None, response: str, truth: str) -> tuple[str, str] | None:
    r"""The answer of a response as `\boxed{...}` and the ground truth, rewritten; None if no rule applies.

    Args:
        part: what `extraction.decisive_part` found in the response.
        response: the part of the response that is judged (`extraction.bounded`).
        truth: the ground truth, LaTeX without a box.
    """
    content = _last_box(response, truth) if part is None else boxed_content(part)
    if content is None or max(len(content), len(truth)) > MAX_EXPRESSION_CHARS:  # `limits` has math-verify refuse it
        return None
    answer, target = _cleaned(content), _cleaned(truth)
    answer, target = _percent(answer, target) or (answer, target)
    answer, target = _notation(answer), _notation(target)
    if not answer or not target:
        return None
    changed = part is None or (answer, target) != (content, truth)
    return (f"\\boxed{{{answer}}}", target) if changed or _needs_exact(answer, target) else None


def _last_box(response: str, truth: str) -> str | None:
    """The last box that is not empty; None if several boxes are one answer, or the ground truth is a list."""
    boxes: list[tuple[int, int, str]] = []  # start, end, content
    for match in _BOX.finditer(response):
        end = closing_brace(response, match.end() - 1)
        content = response[match.end() : end].strip()
        if end is not None and content and not (boxes and match.start() < boxes[-1][1]):
            boxes.append((match.start(), end + 1, content))
    if not boxes or _BOX.search(boxes[-1][2]):
        return None
    if len(boxes) > 1 and (re.search("[,;]", truth) or _JOINED.fullmatch(response, boxes[-2][1], boxes[-1][0])):
        return None
    return boxes[-1][2]


def _cleaned(text: str) -> str:
    """Without style, and without signs and punctuation around it."""
    before = None
    while text != before:
        before = text
        text = _STYLE.sub("", text).strip()
        text = _START.sub("", _END.sub("", text))
        if match := _AROUND.fullmatch(text):
            text = match[match.lastindex or 0].strip()
        if text[:1] == "{" and closing_brace(text, 0) == len(text) - 1:
            text = text[1:-1].strip()
    return text


def _number(text: str) -> Fraction | None:
    """The exact value of an integer, a decimal or a fraction."""
    text = _FRACTION.sub(lambda match: f"{match[1] or match[2]}/{match[3] or match[4]}", _LOOSE_SPACES.sub("", text))
    return Fraction(text) if _NUMBER.fullmatch(text) and not re.search("/0+$", text) else None


def _written(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return str(value) if value.denominator == 1 else f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _percent(answer: str, truth: str) -> tuple[str, str] | None:
    """Percentages as numbers: v% is v/100, or v where only one side has the sign and the other says v.

    A truth of 1 or less is a share: 0.5% is not 0.5.
    """
    answer_match, truth_match = (_PERCENT.fullmatch(text) for text in (answer.rpartition("=")[2].strip(), truth))
    value = _number(answer_match["value"].strip() if answer_match else answer)
    target = _number(truth_match["value"].strip() if truth_match else truth)
    if value is None or target is None or not (answer_match or truth_match):
        return None
    if answer_match and not truth_match:
        value = value if abs(target) > 1 and value == target else value / 100
    elif truth_match and not answer_match:
        target = target / 100 if value == target / 100 else target
    return _written(value), _written(target)


def _notation(text: str) -> str:
    """Angles of functions in radians, and repeating decimals as fractions."""

    def radians(match: re.Match[str]) -> str:
        value = Fraction(match["angle"]) / 180
        angle = f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}\\pi}}{{{value.denominator}}}"
        return f"{match['function']}\\left({angle}\\right)" if bool(match["open"]) == bool(match["close"]) else match[0]

    def fraction(match: re.Match[str]) -> str:
        whole, fixed, cycle = match.groups()
        nines = 10 ** len(fixed) * (10 ** len(cycle) - 1)
        return _written(Fraction(int(whole + fixed + cycle) - int(whole + fixed), nines))

    return _REPEATING.sub(fraction, _DEGREES.sub(radians, text))


def _needs_exact(answer: str, truth: str) -> bool:
    """Whether `judge` compares such a pair more exactly than math-verify, although no text was changed."""
    rounded = _DECIMAL.search(answer) and "." not in truth and _IRRATIONAL.search(truth)
    return bool(rounded or (answer != truth and (_IMAGINARY.search(answer) or _IMAGINARY.search(truth))))
