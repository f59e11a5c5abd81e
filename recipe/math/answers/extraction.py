# ruff: noqa: RUF001
r"""Where a response has its answer, and two shortcuts that give the same verdict as math-verify in less time.

The plain verdict (`Verdict.plain`, and the only one with `normalise=False`) is by definition that of
`math_verify.parse` and `math_verify.verify` on the whole response, with the targets in `judge`. The shortcuts are:

- `decisive_part` finds responses that end in their only `\boxed{...}`, or in a short sentence that begins with their
  first "answer". math-verify extracts that part in any case, so the worker parses the part alone. The whole response is
  parsed only if nothing can be read from the part.
- `decide_exactly` compares such a box with the ground truth without math-verify. It needs the same text, or two plain
  integers.

tests/unit/test_answers_verdicts.py compares both with direct math-verify.
"""

from __future__ import annotations

import re

MAX_RESPONSE_CHARS = 50_000
"""Longer responses are judged by their last MAX_RESPONSE_CHARS characters (about 12,000 tokens) and their last box."""

MAX_BOXES = 64
r"""Only this many `\boxed`, counted from the end, are judged: math-verify's search is quadratic in their number."""

_BOX = "\\boxed"
_BOX_SURROUNDINGS = 2_000
# What may follow the box without changing what math-verify extracts: closing signs and punctuation, but no percent
# sign, letter or digit.
_HARMLESS_TAIL = re.compile(r"(?:[\s.*$]|\\\)|\\\])*")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_ANSWER_WORD = re.compile(r"(?:final )?answer", re.IGNORECASE)
_MAX_SENTENCE = 60
# Inside the box these could start an environment of their own, or another box.
_AMBIGUOUS = re.compile(r"\$|\\\(|\\\[|\\\)|\\\]|\\boxed|\\fbox")


def closing_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`, None if the text ends before."""
    depth = 0
    for match in re.compile(r"(?<!\\)[{}]").finditer(text, opening):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    return None


def final_box(response: str) -> str | None:
    r"""Content of the response's only `\boxed{...}`, if it ends the response so that math-verify must extract it."""
    if response.count(_BOX) != 1 or "\\fbox" in response or "I hope" in response:
        return None
    opening = response.index(_BOX) + len(_BOX)
    end = closing_brace(response, opening) if response.startswith("{", opening) else None
    if end is None or not _HARMLESS_TAIL.fullmatch(response, end + 1):
        return None
    content = response[opening + 1 : end].strip()
    return None if not content or _AMBIGUOUS.search(content) else content


def final_sentence(response: str) -> str | None:
    """End of a response without a box, from its first "answer" or "final answer" on, if it is short enough.

    math-verify first reads what follows such a word within 50 characters on the same line.
    """
    if _BOX in response or "\\fbox" in response:
        return None
    word = _ANSWER_WORD.search(response)
    end = response[word.start() :].rstrip() if word is not None else ""
    tag = word is not None and response[word.start() - 1 : word.start()] in ("<", "/")
    return end if 0 < len(end) <= _MAX_SENTENCE and "\n" not in end and not tag else None


def decisive_part(response: str) -> str | None:
    r"""A short text with the same verdict as the whole response: its final `\boxed{...}` or final sentence.

    None means that math-verify must parse the whole response, not that there is no answer.
    """
    content = final_box(response)
    return final_sentence(response) if content is None else f"{_BOX}{{{content}}}"


def boxed_content(part: str) -> str | None:
    """What stands in the box of a decisive part; None for a sentence."""
    return part[len(_BOX) + 1 : -1] if part.startswith(_BOX) else None


def decide_exactly(part: str, truth: str) -> bool | None:
    """Whether the box of a decisive part equals the ground truth; None if its text alone cannot decide that."""
    content = boxed_content(part)
    if content is None:
        return None
    if _INTEGER.fullmatch(content) and _INTEGER.fullmatch(truth):
        return int(content) == int(truth)
    # A digit guarantees that normalisation (which removes units and commands) leaves something to compare.
    return True if content == truth and re.search(r"\d", truth) and not _AMBIGUOUS.search(truth) else None


def bounded(response: str) -> str:
    """The part of a response that is judged: its end, within MAX_RESPONSE_CHARS and MAX_BOXES.

    If the last box is before that part, the text around the box is put in front.
    """
    text = response[-MAX_RESPONSE_CHARS:]
    last = response.rfind(_BOX)
    if 0 <= last < len(response) - len(text):
        return response[last : last + _BOX_SURROUNDINGS] + "\n" + text
    position = len(text)
    for _ in range(MAX_BOXES):
        position = text.rfind(_BOX, 0, position)
        if position < 0:
            return text
    return text[position:] if text.rfind(_BOX, 0, position) >= 0 else text


_LONGEST_SEPARATOR = 200
_BOXES = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
# Between boxes that together are one answer: a list in a sentence, or one with bullets or numbers.
_JOINED = re.compile(
    r"(?:[\s,;&$.*~]|\\[,;:! ()\[\]]|\\q?quad|\\\\|\\(?:text|mathrm)\s*\{\s*(?:and|or)[\s,]*\}"
    r"|\b(?:and|or|as well as)\b"
    r"|(?<=\n)\s*(?:[-+•]|\(?\w[.)]|\d+[.)])|(?:[a-zA-Z]|\\[a-z]+)(?:_\{?\w+\}?)?\s*=)*"
)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_ANCHORED = re.compile(
    r"^[ \t]*####[ \t]*(?P<hash>[^\n]+)"
    r"|(?:answers?|respuesta|option|choice)(?:\s+(?:is|are|es)\b|[*_`\s]*(?::|=))[:*_`\s]*(?P<answer>[^\n]+)"
    r"|answer[*_`:#\s]*\n[*_`\s]*(?P<below>[^\n]+)|答案[是为:：*\s]*(?P<chinese>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)


def after_thought(text: str) -> str:
    """What stands behind a thought, which is no answer; the whole text if nothing does."""
    _thought, end, rest = text.rpartition("</think>")
    return rest if end and rest.strip() else text


def answer_texts(text: str) -> list[str]:
    r"""The answer of a text: its last box, or the last boxes that are one list, then all boxes as a list; else what
    stands in answer tags, after `####` or after the last "answer is". Empty if it has none of these."""
    text = after_thought(text)
    boxes: list[tuple[int, int, str]] = []  # start, end, content
    for match in _BOXES.finditer(text):
        close = closing_brace(text, match.end() - 1)
        content = text[match.end() : close].strip()
        if close is not None and content and not (boxes and match.start() < boxes[-1][1]):
            percent = re.match(r"\s*\\?%", text[close + 1 :])
            boxes.append((match.start(), close + 1, content + (percent[0] if percent else "")))
    if boxes:
        last = len(boxes) - 1
        while last and boxes[last][0] - boxes[last - 1][1] <= _LONGEST_SEPARATOR:
            if not _JOINED.fullmatch(text, boxes[last - 1][1], boxes[last][0]):
                break
            last -= 1
        return [", ".join(content for *_, content in boxes[first:]) for first in dict.fromkeys((last, 0))]
    if tagged := _TAGGED.findall(text):
        return [re.sub(r"(?is).*\b(?:is|:)\s", "", tagged[-1]).strip() or tagged[-1]]
    if anchored := list(_ANCHORED.finditer(text)):
        sentence = next(part for part in anchored[-1].groups() if part)
        return [re.sub(r"(?:(?<=\w)|(?<=[)}$\]]))\.\s.*", "", sentence)]
    return []
