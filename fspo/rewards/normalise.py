r"""Rewrites answers that math-verify cannot read or misreads, before it judges them.

The rules, described in docs/data-and-rewards.md, work on text: they change how an answer is written, and math-verify
says whether it is right. Here are the choice of the box, the cleaning of its content, percentages and choice letters;
the rules of `notations` follow. What they make of a pair is judged by `judge` with `exact=True`, which adds the three
comparisons that need parsed expressions: a decimal against an irrational number, the imaginary unit, and families over
all integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fspo.rewards import notations
from fspo.rewards.extraction import closing_brace
from fspo.rewards.notations import SPACES, braced, cleaned, number, written

MAX_ANSWER_CHARS = 500
"""Longer answers are left to math-verify, which `limits` makes refuse them."""

_MAX_BOXES = 8
_INTEGER = re.compile(r"-?\d{1,18}")
_SENTENCE = re.compile(r"(?:final )?answer(?: is|:)\s*(\$?)([^\s$]+?)\1\.?", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Between boxes that together are one answer: "2" and "3", or x = 2 or x = 3.
_JOINED = re.compile(r"(?:[\s,;$.]|\\[,;]|\\quad|\\qquad|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\\\(|\\\))*")

_PERCENT = re.compile(
    r"(?:\\text\s*\{\s*)?(?P<value>[^{}%\\]*(?:\\[dt]?frac\{\d+\}\{\d+\})?)(?:\s|\\[ ,;!]|~|\})*"
    r"(?:\\?%|\\text\s*\{\s*(?:\\?%|per\s?cent)\s*\}|per\s?cent)\s*\}?"
)
_MARKED = re.compile(r"\\(?:text(?:bf|rm|it|sf)?|math(?:rm|bf|sf)|mbox|hbox)\s*\{")
_LETTER = re.compile(r"(?:(?i:option|choice|answer)\s+)?(?:\(([A-J])\)|([A-J]))[.):]?")
_LETTER_AND_VALUE = re.compile(r"(?:\(([A-J])\)[.:]?|([A-J])[.):](?=\s))\s*(\S.*)", re.DOTALL)
_OTHER_LETTER = re.compile(
    r"\A(?:or|and|nor|vs|versus)\b|\A[,/&]|\A[A-J]\b|\([A-J]\)"  # right after the first, or in brackets anywhere
    r"|(?<![\w\\])[A-J][.:](?=\s|\Z)|(?<![\w\\])(?<!not )[A-J]\)(?=\s)"  # A. 5 B. 6
    r"|\b(?:or|nor|vs|versus)\b[.]?\s*[A-J]\b|\A[^,/&]*[,/&]\s*[A-J]\Z"  # A. 5 or B; A. 5, B
)


def normalised(part: str | None, response: str, truth: str) -> tuple[str, str] | None:
    r"""The answer of a response as `\boxed{...}` and the ground truth, rewritten; None if no rule applies.

    Args:
        part: what `extraction.decisive_part` found in the response.
        response: the part of the response that is judged (`extraction.bounded`).
        truth: the ground truth, LaTeX without a box.
    """
    found = _answer(part, response, truth)
    if found is None:
        return None
    content, last_of_several = found
    if not last_of_several and _INTEGER.fullmatch(content) and _INTEGER.fullmatch(truth):
        return None
    if len(content) > MAX_ANSWER_CHARS or len(truth) > MAX_ANSWER_CHARS:
        return None
    answer, target = cleaned(content), cleaned(truth)
    for rule in _RULES:
        rewritten = rule(answer, target)
        if rewritten is not None:
            answer, target = rewritten
    if not answer or not target:
        return None
    changed = last_of_several or (answer, target) != (content, truth)
    return (f"\\boxed{{{answer}}}", target) if changed or _needs_exact(answer, target) else None


def _answer(part: str | None, response: str, truth: str) -> tuple[str, bool] | None:
    """The content of the box that holds the answer, and whether math-verify might have taken another; None: no answer.

    That box is the last one that is not empty. Boxes joined by "and", "or" or a comma stay one answer, math-verify's
    list; so do all boxes if the ground truth is a list.
    """
    if part is not None:
        if part.startswith("\\boxed{"):
            return part[len("\\boxed{") : -1], False
        sentence = _SENTENCE.fullmatch(part)
        return (sentence[2], False) if sentence else None
    boxes: list[tuple[int, int, str]] = []  # start, end, content
    starts = [(match.start(), match.end() - 1) for match in _BOX.finditer(response)]
    for start, opening in starts[-_MAX_BOXES:]:
        end = closing_brace(response, opening)
        if end is not None and (content := response[opening + 1 : end].strip()):
            boxes.append((start, end + 1, content))
    if not boxes:
        return None
    outer = [box for box in boxes if not any(a <= box[0] and box[1] <= b and (a, b) != box[:2] for a, b, _ in boxes)]
    content = outer[-1][2]
    while (inner := _BOX.match(content)) and closing_brace(content, inner.end() - 1) == len(content) - 1:
        content = content[inner.end() : -1].strip()
    if _BOX.search(content):
        return None
    if len(outer) > 1 and (_is_list(truth) or _JOINED.fullmatch(response, outer[-2][1], outer[-1][0])):
        return None
    return content, len(starts) > 1


def _is_list(text: str) -> bool:
    """Whether there is a comma or semicolon outside of brackets, other than between thousands."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ",;" and text[max(0, i - 1)] != "\\" and not _thousands(text):
            return True
    return False


def _thousands(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,3}(?:,\d{3})+", text) is not None


def _percent(answer: str, truth: str) -> tuple[str, str] | None:
    """Percentages as numbers: v% is v/100, or v where only one side has the sign and the other says v.

    A truth of 1 or less is a share: 0.5% is not 0.5.
    """
    if not any("%" in text or "cent" in text for text in (answer, truth)):
        return None
    values, signs = [], []
    answer, truth = braced(answer), braced(truth)
    for text in (answer, truth):
        body = text.rpartition("=")[2].strip() if text is answer else text
        match = _PERCENT.fullmatch(body)
        values.append(number(match["value"].strip() if match else body))
        signs.append(match is not None)
    value, target = values
    if value is None or target is None or not any(signs):
        return None
    if signs == [True, False]:
        value = value if abs(target) > 1 and value == target else value / 100
    elif signs == [False, True]:
        target = target / 100 if value == target / 100 else target
    return written(value), written(target)


def _plain_text(text: str) -> str:
    r"""Without `\text{...}` around words, and with single spaces."""
    return SPACES.sub(" ", _MARKED.sub("", text).replace("}", "") if _MARKED.search(text) else text).strip()


def _choice(answer: str, truth: str) -> tuple[str, str] | None:
    """A choice letter without what stands beside it; or that value alone, if the truth is no letter."""
    wanted = _LETTER.fullmatch(_plain_text(truth))
    plain = _plain_text(answer)
    if wanted:
        letter = _LETTER.fullmatch(plain)
        if letter is None:
            letter = _LETTER_AND_VALUE.fullmatch(plain)
            if letter is None or _OTHER_LETTER.search(letter[3]):
                return None
        found, target = letter[1] or letter[2], wanted[1] or wanted[2]
        return (found, target) if (found, target) != (answer, truth) else None
    marked = _MARKED.match(answer)
    end = closing_brace(answer, marked.end() - 1) if marked else None
    if marked is None or end is None:
        return None
    letter = re.fullmatch(r"\(([A-J])\)[.:]?|[A-J][.):]", answer[marked.end() : end].strip())
    value = SPACES.sub(" ", answer[end + 1 :]).strip()
    return (value, truth) if letter and value and not _OTHER_LETTER.search(value) else None


_RULES: tuple[Callable[[str, str], tuple[str, str] | None], ...] = (
    _percent,
    _choice,
    notations.interval,
    notations.family,
    notations.closed_form,
)

_DECIMAL = re.compile(r"\.\d")
_IRRATIONAL = re.compile(r"\\(?:sqrt|pi|ln|log|sin|cos|tan|cot|sec|csc|arc\w+)|(?<![a-zA-Z\\])e(?![a-zA-Z])|\^")
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])|\\sqrt\s*\{\s*-")


def _needs_exact(answer: str, truth: str) -> bool:
    """Whether `judge` compares such a pair more exactly than math-verify, although no text was changed."""
    if _DECIMAL.search(answer) and "." not in truth and _IRRATIONAL.search(truth):
        return True
    return answer != truth and bool(_IMAGINARY.search(answer) or _IMAGINARY.search(truth))
