# ruff: noqa: RUF001
r"""Where a response has its answer: its last box, answer tags, or the end of a sentence such as "The answer is"."""

from __future__ import annotations

import re
from typing import NamedTuple

from recipe.math.answers.spelling import unescaped, unglued
from recipe.math.answers.units import NUMBER_WORD

MAX_RESPONSE_CHARS = 50_000
"""Longer responses are judged by their last MAX_RESPONSE_CHARS characters (about 12,000 tokens) and their last box."""

MAX_BOXES = 64
r"""Only this many `\boxed`, counted from the end, are judged: math-verify's search is quadratic in their number."""

_BOX = "\\boxed"
_BOX_SURROUNDINGS = 2_000
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")


def closing_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`, None if the text ends before."""
    depth = 0
    for match in re.compile(r"(?<!\\)(?:\\\\)*[{}]").finditer(text, opening):
        depth += 1 if match[0][-1] == "{" else -1
        if depth == 0:
            return match.end() - 1
    return None


def sole_box(response: str) -> str | None:
    r"""The content of a response's only box; None where there is none, or another answer may count.

    It costs a search of the text, so that the calling process may do it.
    """
    text = after_thought(response)
    boxes = list(_BOXES.finditer(text))
    close = closing_brace(text, boxes[0].end() - 1) if len(boxes) == 1 else None
    if close is None or re.compile(r"\s{0,9}\\?%").match(text, close + 1):
        return None
    if _DENIED_BOX.match(text, close + 1) or _STATED.search(text, close + 1):
        return None
    return _content(text, boxes[0], close) or None


def _content(text: str, box: re.Match[str], close: int | None) -> str:
    """What stands in a box, without doubled backslashes."""
    return unescaped(text[box.end() : close].strip())


def decide_exactly(content: str, truth: str) -> bool | None:
    """Whether the content of a box is the ground truth, where both are plain integers; None where one is not."""
    if _INTEGER.fullmatch(content) and _INTEGER.fullmatch(truth):
        return int(content) == int(truth)
    return None


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
# The more special alternatives come first, and nothing is read in two ways.
_JOINED = re.compile(
    r"(?>(?i:case|part|option|question)\s+\w+\s*[:.)]|\|[^|\n]{0,40}\||\||(?<=\n)\s*(?:[-+•]|\(?\w[.)]|\d+[.)])"
    r"|(?<=[\s$;,])\(?(?:[ivx]{1,4}|[a-zA-Z]|\d)\)"
    r"|(?:[a-zA-Z]|\\[a-z]+)(?:_\{?\w+\}?)?\s*[=:]|/"
    r"|(?i:(?:second|third|other)\s+(?:answer|solution|value|root|case|part)|(?:part|case)\s+(?:two|three))\s*(?:is|:|=)"
    r"|(?<![.!?\n]\s)(?<!\n)(?i:if|when|for|otherwise)\b[^.\n\\]{0,40}[,:]"
    r"|\\q?quad|\\(?:text|mathrm)\s*\{\s*(?:and|or)[\s,]*\}|\b(?:and|or|as well as|possibly|perhaps|maybe)\b"
    r"|[\s,;&$.*~]|\\[,;:! ()\[\]]|\\\\)*+"
)
#: Words between two boxes that do not introduce the second one; nor do commands, cells of a table and numerals.
_CONNECTING = re.compile(
    r"\\[a-z]+|\|[^|\n]*\||\b[ivx]+\)|\b(?:and|or|the|as well as|otherwise|possibly|perhaps|maybe)\b", re.IGNORECASE
)
_LONGEST_LEAD, _LONGEST_TAIL = 120, 20
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_ANCHORED = re.compile(
    r"^[ \t]*####[ \t]*(?P<hash>[^\n]+)"
    r"|(?:answers?|respuesta|réponse|antwort|risposta|resposta|option|choice)(?:\s+correct[ao]e?)?"
    r"(?:\s+(?:is|are|es|est|ist|è|é)\b|[*_`\s]*(?::|=))[:*_`}\s]*(?P<answer>[^\n]+)"
    r"|answer[*_`:#\s]*\n[*_`\s]*(?P<below>[^\n]+)"
    r"|(?:答案|故选|应选|故填|选项(?=[是为])|(?<![不能可])选择?(?=\s*[(（]?[A-Z]\b)|答え?(?=[:：は]))[是为应选は:：*\s]*(?P<chinese>[^\n]+?)(?=です|である|$)",
    re.IGNORECASE | re.MULTILINE,
)


#: A chat template's end of a turn.
_TURN = re.compile(r"<\|(?:im_end|eot_id|end_of_text|endoftext)\|>|<\|im_start\|>\s*user")
#: A sentence that denies a box, whole: "is wrong.", but no condition, as "is wrong if n is even".
_DENIED_BOX = re.compile(
    r"[\s$)\]\\]*(?:,\s*)?(?:(?:is|was|are)(?:\s+(?:wrong|incorrect|false)|(?:\s+not|n['’]t)\s+(?:right|correct|true|the\s+answer))"
    r"|(?:cannot|can['’]t)\s+be\s+(?:right|correct|true|the\s+answer))(?=[*\s]{0,9}(?:[.!\n]|\Z))",
    re.IGNORECASE,
)
#: Behind the last box: "The final answer is $5$."
_STATED = re.compile(
    r"(?:\bfinal\s+answer|(?:\A|[.\n])[*\s]{0,9}(?:(?:so|thus|hence|therefore),?\s+)?the\s+answer)\s*(?:is|:)[:*\s]*"
    r"(?P<answer>\$(?=[^$\n]{0,200}\d)[^$\n]{1,200}\$|-?\d[\d,]{0,40}(?:\.\d{1,40})?)(?=[*\s]{0,9}(?:[.!](?!\d)|\n|\Z))",
    re.IGNORECASE,
)


def after_thought(text: str) -> str:
    """What stands behind a thought, which is no answer, and before another turn; the whole text if nothing does."""
    text = next((turn for turn in _TURN.split(text) if turn.strip()), text)
    rest = text.rpartition("</think>")[2]
    return rest if rest.strip() else text


class Extract(NamedTuple):
    """The answer of a text, then that with all of its boxes; and whether it is a sentence, not in a box or in tags."""

    texts: list[str]
    in_sentence: bool


def answer_texts(text: str) -> Extract:
    r"""The answer of a text: its last box, or the last boxes that are one list, then all boxes as a list; else what
    stands in answer tags, after `####` or after the last "answer is". Empty if it has none of these."""
    text = after_thought(text)
    boxes: list[tuple[int, int, str]] = []  # start, end, content
    for match in _BOXES.finditer(text):
        close = closing_brace(text, match.end() - 1)
        content = _content(text, match, close)
        if close is not None and content and not (boxes and match.start() < boxes[-1][1]):
            percent = re.match(r"\s*\\?%", text[close + 1 :])
            boxes.append((match.start(), close + 1, content + (percent[0] if percent else "")))
    if boxes:
        last = len(boxes) - 1
        while last and boxes[last][0] - boxes[last - 1][1] <= _LONGEST_SEPARATOR:
            if not _JOINED.fullmatch(text, boxes[last - 1][1], boxes[last][0]):
                break
            if not _are_alike(text, boxes[last - 1][:2], boxes[last][:2]):
                break
            last -= 1
        answers = [", ".join(content for *_, content in boxes[first:]) for first in dict.fromkeys((last, 0))]
        denied = _DENIED_BOX.match(text, boxes[-1][1])
        stated = [match["answer"] for match in _STATED.finditer(text, boxes[-1][1])][-1:]
        # Any other number may be the box in other words: 0.33 for 1/3, 10 for 10 million, the length of a vector.
        if denied or (stated and decide_exactly(answers[0], stated[0].strip("$").replace(",", "")) is False):
            return Extract(stated, not stated)
        return Extract(answers, False)
    if tagged := _TAGGED.findall(text):
        value = re.sub(r"(?is).*(?:\bis|(?<=[a-z]):)\s", "", tagged[-1])  # "The answer is 12", not "12 is the answer"
        return Extract([part for part in dict.fromkeys((value, tagged[-1])) if part.strip()] or [""], False)
    if anchored := [match for match in _ANCHORED.finditer(text) if not _DOUBTED.search(text[: match.start()][-200:])]:
        sentence = next(part for part in anchored[-1].groups() if part)
        end = re.search(r"(?:(?<=\w)|(?<=[)}$\]]))\.\s", sentence)
        if end and _TAKEN_BACK.match(sentence, end.end()):
            return Extract([], True)
        return Extract([sentence[: end.start()] if end else sentence], True)
    return Extract([], True)


def _are_alike(text: str, first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether a first box is introduced as a second one is: "if odd, 5, if even, 6", "5 if odd, 6 if even".

    One of the words between them then stands before the first box, or behind the second one.
    """
    around = text[max(0, first[0] - _LONGEST_LEAD) : first[0]] + " " + text[second[1] : second[1] + _LONGEST_TAIL]
    words = re.findall("[a-z]{2,}", _CONNECTING.sub(" ", text[first[1] : second[0]].lower()))
    return not words or any(re.search(rf"\b{word}\b", around, re.IGNORECASE) for word in words)


#: A sentence that takes a number back: "The answer is 17. Or rather 18.", "The answer is 17. This is wrong."
_TAKEN_BACK = re.compile(
    rf"\W*(?:or|no(?=,|\s+wait)|wait|actually|rather|sorry|correction|hmm)\b[^.\n]*(?:\d|{NUMBER_WORD})"
    r"|\W*(?:but\s+)?(?:this|that|it)\s+is\s+(?:wrong|false|incorrect)\W*\Z|\W*but\s+(?:this|that|it)\s+is\s+impossible\b"
    r"|\W*(?:(?:then|this|that|it|is|leads|to|a)\s+)*contradiction\b",
    re.IGNORECASE,
)
#: A number that a sentence denies before or behind the one that it gives: "not 17, but 18", "17, not 18".
_DENIED = re.compile(
    r"(?:,\s*)?(?:\bnot\s+(?=it['’]?s?\s))?(?:\b(?:it['’]s|it\s+is|is|are)\s+)?(?:\bnot|n['’]t)\s+(?:be\s+)?[-$\\(]*\d[\d.,]*(?<!,)\)?\$?"
    r"(?=[\s,;.]*(?:but|it|which|rather|the|\Z)\b|[\s,;.]*\Z)",
    re.IGNORECASE,
)
#: Before "the answer is": "It is not the case that".
_DOUBTED = re.compile(
    r"\b(?:not|false|untrue|wrong|doubt\w*|unlikely)\b[^.,;\n]*\bthat\s+(?:the\s+)?(?:final\s+)?\Z"
    r"|\b(?:guess|suppose|assume)\s+(?:that\s+)?(?:the\s+)?(?:final\s+|correct\s+)?\Z",
    re.IGNORECASE,
)
#: With one of these a sentence does not say that its number is the answer.
_HEDGE = re.compile(
    r"\b(?:not|cannot|never|nor|neither|nobody|no one|unlikely|doubt\w*|false|wrong|nearly|exclude"
    r"|anything but|rule out|too (?:large|small|big|much|many|few|high|low)|(?:i|my|an?|['’]d)\s+guess|presumably"
    r"|used to be|or rather"
    r"|nicht|keine?|n['’]est pas|no es|не)\b|n['’]t\b|不"
    r"|\A\W*(?:suppose|assume)\b|\?\Z"
    r"|\b(?:times|end(?:s|ing)? (?:in|with)|includ(?:es?|ing))\s+\d[\d.,]*\W*\Z"
    r"|\bfrom\s[^.]{0,40}\d\W{0,9}\s(?:to|through|until)\s\W*\d"
    r"|\d\W*\b(?:or|and)\s+(?:more|less|fewer|above|over|greater|higher|lower|larger|smaller|below|so)\b"
    r"|\b(?:than|least|most|up to|over|under|above|below|between|either|except|instead of|without|or|possibly"
    r"|perhaps|maybe|half|twice|double|multiple|divisible by|square|cube|reciprocal|one|number after|close to|near"
    r"|exceeds?|different from|differs from|such as|number like|for example|(?:might|may|could) be)"
    r"\s+(?:of\s+)?[-$\\({]*\d|\d\W*\s(?:divided by|choose|to the power|point \w|and (?:a|one|two|three) \w|less \d)",
    re.IGNORECASE,
)
#: At the end of a sentence: "by Theorem 3", "(see section 3)".
_REFERENCE = re.compile(
    r"(?:\b(?:equation|formula|theorem|lemma|figure|section|problem|exercise)\s[^\d\w]*\d+\D*?){1,9}\Z", re.IGNORECASE
)
_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def said(text: str) -> str:
    """The last sentence with a number or a formula, where it says it plainly; else nothing."""
    text = _FORMULA.sub(lambda match: match[0].replace("\n", " "), after_thought(text))
    sentences = re.split(r"(?<=[a-zA-Z\d)}$\]])[.!](?:\s|\Z)|(?<=[a-zA-Z\d)}$\]]\?)\s|\n", text)
    numbered = [number for number, part in enumerate(sentences) if re.search(r"\d", part) or _FORMULA.search(part)]
    if not numbered or any(map(_TAKEN_BACK.match, sentences[numbered[-1] + 1 :])):
        return ""
    last = sentences[numbered[-1]]
    last = _REFERENCE.sub(" ", _DENIED.sub(" ", last))
    last = re.sub(r"(?<=\d)(?=[\u4e00-\u9fff])|(?<=[\u4e00-\u9fff])(?=\d)", " ", last)
    return "" if _HEDGE.search(last) else re.sub(r"\A\W*(?:final\s+)?answer\W*:", "", last, flags=re.IGNORECASE)


def bare(text: str) -> list[str]:
    """A text of one formula without words, such as "x=1, y=2"."""
    is_formula = "=" in text and not re.search(
        r"\n|[$\u4e00-\u9fff]|(?<![\\a-zA-Z])(?!and\b|or\b)[a-zA-Z]{2}", unglued(text.strip())
    )
    return [text] if is_formula else []


def formula(text: str) -> list[str]:
    """The last formula of a text."""
    formulas = _FORMULA.findall(text)
    return ["".join(formulas[-1])] if formulas else []
