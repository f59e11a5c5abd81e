r"""Where a response has its answer: in its last box, or else behind its last "answer is", "answer:" or `####`."""

from __future__ import annotations

import re
from typing import Final

from recipe.math.answers.spelling import closing

#: Characters at the end of a response that are read.
MAX_RESPONSE_CHARS: Final = 50_000
#: Boxes at the end of a response that are read: as many can be one list.
MAX_BOXES: Final = 16

_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE: Final = r"(?<!\\)(?:\\\\)*[{}]"
_PERCENT: Final = re.compile(r"\s*\\?%")
#: Between two boxes of one list: `$\boxed{2}$, $\boxed{3}$ and $x=\boxed{5}$`.
_JOINED: Final = re.compile(
    r"(?:[-\s,;&$.*~]|\\[,;:! ()\[\]\\]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b"
    r"|[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
#: What stands in front of an answer; of several in one line or tag the last counts.
_STATED: Final = re.compile(
    r"####[ \t]*|\banswer[*_`]*(?:\s+is\b(?!\s+(?:in)?correct)|\s*:)[:*_`\s]*"
    r"|<answer>(?=(?:(?!<answer>).)*</answer>)\s*",
    re.IGNORECASE | re.DOTALL,
)
_END_OF_SENTENCE: Final = re.compile(r"(?<=[\w)}$\]*])[.!?]\s")
_END_OF_TURN: Final = re.compile(r"<\|(?:im_end|eot_id|end_of_text|endoftext)\|>|<end_of_turn>|</s>")


def answer_of(response: str) -> str | None:
    """The answer of a response; None if it gives none.

    What stands in front of `</think>`, in a thought that is not closed, or behind an end of turn does not count. Boxes
    that only commas, "and", "or" or `x =` separate are one list. Prose without a box or "answer" has no answer.
    """
    text = next(filter(str.strip, _END_OF_TURN.split(response)), "")
    text = text.rpartition("</think>")[2].partition("<think>")[0][-MAX_RESPONSE_CHARS:]
    if boxes := _boxes(text):
        if not boxes[-1][2]:
            return None
        first = len(boxes) - 1
        while first and _JOINED.fullmatch(text[boxes[first - 1][1] : boxes[first][0]][:99]):
            first -= 1
        return ", ".join(dict.fromkeys(content for *_, content in boxes[first:])) or None
    *_, stated = None, *_STATED.finditer(text)
    if stated is None:
        return None
    end = "(?i)</answer>" if stated[0].startswith("<") else "(?i)\n|</answer>"
    said = re.split(end, text[stated.end() :], maxsplit=1)[0]
    return _END_OF_SENTENCE.split(said, maxsplit=1)[0].strip() or None


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of the last boxes that are closed and in no other one; a percent sign behind counts."""
    boxes: list[tuple[int, int, str]] = []
    for match in list(_BOX.finditer(text))[-MAX_BOXES:]:
        close = closing(text, match.end() - 1, _BRACE)
        if close >= 0 and not (boxes and match.start() < boxes[-1][1]):
            percent = "%" if _PERCENT.match(text, close + 1) else ""
            boxes.append((match.start(), close + 1, text[match.end() : close].strip() + percent))
    return boxes
