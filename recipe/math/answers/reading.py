r"""From the text of an answer to its kind: one reading for the answer and for the ground truth.

:func:`read` splits a text that :func:`recipe.math.answers.spelling.cleaned` has written into an :class:`Answer`: a leaf
(number or expression) with the words after it, a list, a relation, and so on. math-verify parses the leaves
(:mod:`recipe.math.answers.comparing`). A part that is left unread makes the kind UNREAD, unless it is words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from recipe.math.answers.spelling import FUNCTIONS, closes, stripped
from recipe.math.answers.units import cardinal, unit

LEAF, WORDS, LIST, TUPLE, REGION = "leaf", "words", "list", "tuple", "region"
RELATION, RESIDUE, UNREAD = "relation", "residue", "unread"
#: A condition of the answer begins with one of them: "where n = 3".
_CONDITION: Final = r"(?:for|where|with|when|if|at|attained|provided)\b"
#: Behind other words a number is not the answer: "not 5", "more than 5".
_BEFORE: Final = re.compile(
    r"(?:exactly|only|so|an?|the|of|Rs|USD|EUR|GBP|US|answer|total|答案?|一?共|总共|是|为|有|约|等于|\W)+",
    re.IGNORECASE,
)
#: Words that make another number of the one before them, such as "tenths", "halved", "more than".
_AFTER: Final = re.compile(r"\W*(?:\w*(?<!mon)ths?|thirds|halves|quarters|\w{2,}ed|.*\b(?:than|root|factorial))\b")
_BASES: Final = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
#: One phrase a line, in several wordings.
PHRASES: Final = tuple(
    tuple(line.split(", "))
    for line in (
        "no solution, no solutions, none, empty set, \\emptyset, \\{\\}, no such, there is no solution",
        "infinitely many, infinite, infinitely many solution, infinite solution, \\infty, infinity",
        "does not exist, dne, undefined, not exist, limit does not exist, not defined",
        "impossible, not possible, cannot be done",
    )
)
_MONTHS: Final = "january february march april may june july august september october november december".split()  # noqa: SIM905
#: With one of them beside it a number is not given as the answer.
_DENIAL: Final = re.compile(
    "\x02(?:[^\x03]*\\b(?:never|wrong|false|incorrect|maybe|perhaps|possibly|probably|likely|hopefully|presumably|might"
    "|could|guess\\w*|unsure|not sure|uncertain|i think|doubt\\w*|too)\\b|(?:no|not)\\W*\x03)",
    re.IGNORECASE,
)
#: Words that say of what kind a named thing is: "isosceles triangle", "Bob wins".
FILLERS: Final = frozenset(
    "a an on the real there triangle function number integer win winner won is it they are".split()  # noqa: SIM905
)

_CHUNK: Final = re.compile("\x02([^\x03]*)\x03")
_THE_ANSWER: Final = re.compile("\x02(?:(?:a|the)\\s+)?(?:winner|answer|it)\x03", re.IGNORECASE)


@dataclass(frozen=True)
class Answer:
    """An answer of some kind. A collection or a relation has ``parts``; a leaf has ``text``."""

    kind: str
    text: str = ""
    parts: tuple[Answer, ...] = ()
    form: str = ""  # brackets of a collection ("matrix", ":" of a ratio), sign of a relation
    words: str = ""  # behind a leaf: its unit, or what it counts; of a relation "name = value": the name


SEPARATOR: Final = re.compile(r"[,;&]|\\l(?:and|or)(?![a-z])")
SIGN: Final = re.compile(
    r"(?<!\\)\\(?:le|ge|ne|in|notin|equiv|approx|sim|lesssim|gtrsim|ll|gg|subset\w*|to|propto)(?![a-zA-Z])|[=<>]"
)
_FLIPPED: Final = {">": "<", r"\ge": r"\le", r"\gg": r"\ll"}
_COUNTS: Final = re.compile(r"[-\d=<>+*/^|\\]")  # what may not be left unread
_LETTER: Final = r"(?:[a-zA-Z]|\\(?!in\b|pi\b)[a-z]+)(?:_\{\w+\})?\s*"
DOMAIN: Final = re.compile(
    rf"(?:[,;(]|\x02{_CONDITION}[^\x03]*\x03)\s*(?P<names>{_LETTER}(?:(?:,|\\land)\s*{_LETTER})*)\\in\s*"
    r"(?P<set>\\mathbb.*?)[\s)]*\Z"
)
#: The name of a letter that ranges over the integers in both answers, and of one that ranges over another set.
INTEGER, ELEMENT = r"\zeta", r"\xi"
_BOUND: Final = re.compile(rf"\\(?:{INTEGER[1:]}|{ELEMENT[1:]})(?![a-z])")
_NAME: Final = re.compile(
    rf"(?!\\(?:{FUNCTIONS}|sqrt|frac|pi)(?![a-zA-Z])|e\Z)"
    r"(?:\\?#|\\(?:angle|triangle|det|dim|deg|bar|overline|vec|overrightarrow|hat|Delta)\s*\{?\s*)?"
    r"(?:[a-zA-Z]+|\\[a-zA-Z]+|\|[A-Z]{2}\||[a-zA-Z]\^\{?-1\}?|\([a-zA-Z](?:,\s*[a-zA-Z])+\))\}?"
    r"(?:_\{?\w+\}?|_\{[^{}]*\})?'*\s*(?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\])?"
)
_MATRIX: Final = re.compile(r"\\begin\s*\{([pbB]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
#: A row as a column: (1, 2)^T.
_TRANSPOSED: Final = re.compile(
    r"(?:[(\[]|\\begin\{[pbB]matrix\})((?:(?!\\\\|\\end).)*)(?:[)\]]|\\end\{[pbB]matrix\})"
    r"\^\{(?:T|\\(?:top|intercal))\}",
    re.DOTALL,
)
_RESIDUE: Final = re.compile(r"(.+?)\s*\(?\s*\\[bp]?mod(?![a-z])\s*\{?\s*(\d+)\s*\}?\s*\)?")
_DAY: Final = r"0?(?P<day>\d{1,2})\s*(?:st|nd|rd|th)?"
_MONTH: Final = rf"(?P<month>{'|'.join(_MONTHS)})"
_YEAR: Final = r"(?:[\s,]+(?P<year>\d{4}))?"
_DATES: Final = (
    re.compile(rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}{_YEAR}", re.IGNORECASE),
    re.compile(rf"{_MONTH}\s+(?:the\s+)?{_DAY}{_YEAR}", re.IGNORECASE),
)


def read(text: str, inner: bool = False) -> Answer:
    """The kind of a cleaned text; ``inner`` of a part that holds no list."""
    text = stripped(text)
    if match := next(
        filter(None, (date.fullmatch(" ".join(_CHUNK.sub(r" \1 ", text).split())) for date in _DATES)), None
    ):
        return Answer(WORDS, " ".join(filter(None, (match["day"], match["month"], match["year"]))))
    if match := _TRANSPOSED.fullmatch(text):
        text = f"({match[1].replace('&', ',')})"
    if match := _MATRIX.fullmatch(text):
        rows = [re.split("&", row) for row in re.split(r"\\\\", match[2].strip().removesuffix("\\\\"))]
        if len(rows) == len(rows[0]) == 1:
            return read(rows[0][0])
        cells = tuple(Answer(TUPLE, parts=tuple(read(cell, True) for cell in row)) for row in rows)
        return Answer(TUPLE, text, cells, "matrix")
    if not inner:
        if _DENIAL.search(text) and re.search(r"\d", text):
            return Answer(UNREAD, text)
        systems = [item for item, _ in split(text, re.compile(r";|\\lor(?![a-z])"))]
        if len(systems) > 1:
            solutions = [read(system) for system in systems]
            names = [tuple(part.words for part in solution.parts) for solution in solutions]
            if len(set(names)) == 1 and len(set(names[0])) > 1:  # x=1, y=2 or x=2, y=1
                return Answer(LIST, text, tuple(_values(solution) for solution in solutions))
        text = stripped(DOMAIN.sub("", text)) or text
        text = re.sub(r"[,;]\s*(?=\\l(?:and|or)(?![a-z]))", "", text)
        pieces = list(split(text, SEPARATOR))
        items = [_unconditional(item) for item, _ in pieces]
        for number, (_, separator) in enumerate(pieces):
            if separator[:2] == "\\l" and any(
                _is_words(item) or not item.strip() for item in items[number - 1 : number + 1]
            ):
                return Answer(UNREAD, text)  # "no solution or 5", "5 and a half"
        if len(items) > 1:
            return _list(items)
        text = items[0]
    if match := _RESIDUE.fullmatch(text):
        denied = "not" if re.search(r"\\not(?![a-z])", match[1]) else ""
        return Answer(RESIDUE, denied, parts=(read(re.split(r"\\equiv|=", match[1])[-1], True), read(match[2])))
    name, _, value = text.partition("=")
    if "|" in name and value and _is_name(stripped(name)):  # |A \cup B| = 5
        return _relation([(name, ""), (value, "=")])
    if re.search(r"\\(?:cup|cap|setminus|mathbb|emptyset)(?![a-z])|\\\{.*[|:].*\\\}|\A\\\{\s*\\\}\Z", text):
        return Answer(REGION, re.sub(r"\A\s*[a-zA-Z]\s*\\in ", "", text).strip())
    if re.search(r"\\(?:pm|mp)(?![a-z])", text):
        sides = [re.sub(r"\\(pm|mp)(?![a-z])", lambda m: "+-"[(m[1] == "pm") == lower], text) for lower in (0, 1)]  # noqa: B023
        return Answer(LIST, parts=tuple(read(side, inner) for side in sides))
    text = re.sub(r"\A[A-Z]'?\s*(?=\([^()]*,[^()]*\)\Z)", "", text)
    text = re.sub("(?<=[)\\]])\\s*(?:\x02[^\x03]*\x03\\s*)+\\Z", "", text) if text[:1] in "([" else text  # (3, 5) cm
    if (match := re.match(r"\\\{|[(\[]", text)) and closes(text, match.end() - 1) == len(text) - 1:
        if text[0] == "\\":
            return _list([item for item, _ in split(text[2:-2], SEPARATOR)], "{}")
        items = split_tuple(text)
        if len(items) > 1:
            entries = tuple(read(item, True) for item in items)
            if all(row.form == "[]" for row in entries):
                return Answer(TUPLE, text, tuple(replace(row, form="") for row in entries), "matrix")
            return Answer(TUPLE, text, entries, text[0] + text[-1])
        if text[0] + text[-1] in ("()", "[]"):
            return read(text[1:-1])
    if re.fullmatch("\\d+(?:\\s*\x02to\x03\\s*\\d+)+", text, re.IGNORECASE):  # a ratio or a range, so no quotient
        return Answer(TUPLE, "to", tuple(_leaf(part) for part in re.findall(r"\d+", text)), ":")
    if re.match(r"\s*\d+(?:\s*:\s*(?:\d+|\.\.\.))+", text):
        return Answer(TUPLE, parts=tuple(map(_leaf, text.split(":"))), form=":")
    relation = list(split(re.sub(r"=\s*(?=\\approx)", "", text), SIGN))  # "x is approximately 5"
    return _relation(relation) if len(relation) > 1 else _leaf(text)


def split(text: str, separator: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """The parts of a text between separators outside of all brackets, each with the separator before it."""
    depth, start, before = 0, 0, ""
    bracket = re.compile(rf"(?P<open>[{{(\[]|\\begin)|(?P<close>[}})\]]|\\end)|(?P<separator>{separator.pattern})")
    for match in bracket.finditer(text):
        if match["separator"] is None:
            depth += 1 if match["open"] else -1
        elif depth == 0:
            yield text[start : match.start()], before
            start, before = match.end(), match["separator"]
    yield text[start:], before


def _unconditional(item: str) -> str:
    """Without a condition ("where n = 3") and without a remark in brackets at its end."""
    item = re.sub(
        r"(?<=\S)\s*\((?=[^()]*[=<>\x02]|\s*\\approx|\w\s*\\in)(?:[^()\d]*|[^()]*[=<>~][^()]*|\s*\\approx[^()]*)\)\s*\Z",
        "",
        item,
    )
    match = re.search(rf"\x02{_CONDITION}[^\x03]*\x03(.*)\Z", item)
    is_condition = (
        match
        and not re.search(r"\b(?:else|otherwise|or|but)\b", match[1], re.IGNORECASE)
        and (not _COUNTS.search(_BOUND.sub("", match[1])) or len(list(split(match[1], SIGN))) > 1)
    )
    return item[: match.start()] if match and is_condition else item


def split_tuple(text: str) -> list[str]:
    """The texts of the parts of a tuple in brackets."""
    return [item for item, _ in split(text[1:-1], re.compile("[,;]"))]


def _is_words(item: str) -> bool:
    return "\x02" in item and not re.search(r"\w|\.\.\.", _CHUNK.sub("", item))


def _values(solution: Answer) -> Answer:
    """The values of several names as a tuple."""
    return Answer(TUPLE, solution.text, tuple(equation.parts[1] for equation in solution.parts), "()")


def _list(items: list[str], form: str = "") -> Answer:
    """A list or set; words beside its items do not count."""
    items = [item for item in map(stripped, items) if item]
    items = [item for item in items if not _is_words(item)] or items
    labels = [match[1].lower() if (match := re.match("\x02([^\x03]+)\x03\\s*:", item)) else "" for item in items]
    parts: list[Answer] = []
    for part in map(read, items):
        if part.words == "names":  # of several solutions: "(x, y) = (5, 8) and (8, 5)"
            part = _values(part)
        parts += part.parts if part.kind == LIST and not part.form else [part]
    if all(labels) and len(set(labels)) == len(parts) > 1:  # "Ann: 2, Bob: 3"
        parts = [
            Answer(RELATION, f"{label} = {part.text}", (Answer(WORDS, label), part), "=", label)
            for label, part in zip(labels, parts, strict=True)
        ]
    return parts[0] if len(parts) == 1 and not form else Answer(LIST, parts=tuple(parts), form=form)


def _relation(sides: list[tuple[str, str]]) -> Answer:
    texts, signs = [stripped(side) for side, _ in sides], [sign for _, sign in sides[1:]]
    if len(texts) > 2 and signs[-1] == "=" and _is_words(texts[-1]):  # "x = 40 is the answer"
        return _relation(sides[:-1])
    if signs == ["="] and _THE_ANSWER.fullmatch(texts[1]):
        return read(texts[0])  # "Bob is the winner"
    if signs[-1] in ("\\approx", "\\sim"):  # an approximation behind the exact value does not count
        numbers = [float(side) for side in texts if re.fullmatch(r"-?\d+(?:\.\d+)?", side)]
        if len(numbers) == len(texts) == 2 and abs(numbers[0] - numbers[1]) > 0.02 * abs(numbers[0]):  # 5 \approx 6
            return Answer(UNREAD, "".join(texts))
        return read(texts[-1] if len(texts) == 2 and _is_name(texts[0], wide=True) else "=".join(texts[:-1]))
    if len(texts) > 2 and set(signs) == {"="}:  # S = ab = 6 and 2 + 3 = 4 + 1 = 5, but not x = 9 = 8
        if _is_words(texts[0]):  # the answer is y = 2 x + 1
            return _relation(sides[1:])
        is_named = _is_name(texts[0], wide=True) and not re.fullmatch(r"-?[\d.]+", texts[-2])
        return _relation([sides[0 if is_named else -2], sides[-1]])
    if signs == ["\\in"] and _is_name(texts[0], wide=True):
        return read(texts[1])
    name = texts[0] if signs == ["="] and _is_name(texts[0]) else ""
    if set(signs) <= set(_FLIPPED):
        texts, signs = texts[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    text = " ".join(f"{sign} {side}" for side, sign in zip(texts, ["", *signs], strict=True)).strip()
    parts = tuple(map(read, texts))
    if name[:1] == "(" and len(names := name[1:-1].split(",")) == len(parts[1].parts):
        equations = [
            _relation([(left, ""), (right, "=")]) for left, right in zip(names, split_tuple(texts[1]), strict=True)
        ]
        return Answer(LIST, text, tuple(equations), words="names")
    return Answer(RELATION, text, parts, " ".join(signs), words=name)


def naming(answer: Answer) -> Answer:
    """The reading of an answer where "m - n = 7" names 7. A truth of these letters is a relation between them."""
    if answer.kind == LIST:
        return replace(answer, parts=tuple(map(naming, answer.parts)))
    if answer.form == "=" and not answer.words and len(answer.parts) == 2:
        for name, value in (answer.parts, answer.parts[::-1]):
            if _is_name(name.text, wide=True):
                return replace(answer, parts=(name, value), words=name.text)
    return answer


def _is_name(text: str, wide: bool = False) -> bool:
    """Whether something is called that: "m + n = 42", not "x + y = 42".

    Sums have distinct names. Differences and products have lengths or measures; if ``wide``, any names.
    """
    name = _CHUNK.sub(" ", text).strip() or "x"
    terms = re.split(r"\s*(?:[+-]|\\cdot(?![a-z]))\s*", name)
    is_sum = len(set(terms)) == len(terms) and (len(terms) > 1 or name[0] == "|")
    measure = r"[A-Z]{2}|\|[A-Z](?:[A-Z]|\s*\\(?:cup|cap|setminus)\s*[A-Z])*\|"
    letter = r"\d*[a-wA-W]|[a-wA-W]_\{\w+\}|\\(?:alpha|beta|gamma)"
    term = rf"{letter}|{measure}" if wide or not re.search(r"-|\\cdot", name) else measure
    if is_sum and all(re.fullmatch(term, one) for one in terms):
        return True
    return bool(_NAME.fullmatch(name) or re.fullmatch(r"[A-Z]{2}\^\{2\}|\[[A-Z]{3,}\]", name))


def _leaf(text: str) -> Answer:
    """A number or expression with the words around it, or words."""
    pieces = _CHUNK.split(text)
    words = pieces[1::2]
    maths = [piece.strip(" .,:;!?'\"") if words else piece.strip() for piece in pieces[::2]]
    places = [number for number, run in enumerate(maths) if re.search(r"[^\W_]|[-+=<>^*/\\|.]", run)]
    counts = [number for number in places if _COUNTS.search(maths[number])]
    if not places and (spelled := _spelled(" ".join(words))):
        return spelled
    if (words and not counts) or not places:
        return Answer(WORDS if words else UNREAD, " ".join(text.split()))
    number = places[0]
    after = " ".join(words[number:])
    named = not any(words[:number]) or re.match(r"\s*[:,]", pieces[2 * number]) or _BEFORE.fullmatch(words[number - 1])
    if len(places) > 1 or not named or _AFTER.match(after):
        return Answer(UNREAD, text)
    return Answer(LEAF, maths[number], words=after)


def _spelled(words: str) -> Answer | None:
    """A number in words, with a unit of the table behind it."""
    names = words.split()
    for end in range(len(names), 0, -1):
        value, rest = cardinal(" ".join(names[:end])), unit(" ".join(names[end:]))
        if value is not None and (end == len(names) or rest.dimension or rest.percent):
            return Answer(LEAF, str(value), words=" ".join(names[end:]))
    return None


def choice(text: str) -> str:
    """The letters of a choice, such as C, (C) or A, C, or (C) 12 with its text. Empty if none."""
    text = re.sub("[\x02\x03]", "", text).replace(r"\land", "and").strip()
    text = re.sub(r"\A(?:(?:option|choice|answer)s?|故?选|答案?是?)\s*:?\s*(?=\(?[A-Z])", "", text, flags=re.IGNORECASE)
    if re.fullmatch(r"(?:\(\s*[A-Z]\s*\)\s*(?:,|and)?\s*){2,}", text):  # (A), (C)
        text = re.sub(r"[()]", " ", text).strip()
    match = re.match(r"\(?\s*([A-Z](?:\s*(?:,|and|,\s*and)?\s*[A-Z])*)(?![\w'])(\s*\)[.:)]*|[.:)]*)\s*", text)
    if match is None:
        return ""
    rest = text[match.end() :]
    if rest and (not match[2] or re.match(r"(?:and|,|\\lor)\W*[A-Z]\b", rest) or re.search(r"\([A-Z]\)", rest)):
        return ""
    letters = re.sub("[^A-Z]", "", match[1])
    return "" if letters == match[1] and list(letters) != sorted(letters) else "".join(sorted(letters))  # CAB: an order


def based(text: str) -> tuple[int, int] | None:
    """Value and base of a number such as 52_8 or 1A_{16}; None of anything else."""
    match = re.fullmatch(r"\(?\s*([0-9][0-9A-F]*|[A-F][0-9A-F]*(?=_\{16))\s*\)?_\{\(?(\w+)\)?\}", text.strip())
    if match is None:
        return None
    base = int(match[2]) if match[2].isdigit() else [*_BASES.split(), match[2]].index(match[2].lower())
    try:
        return int(match[1], base), base
    except ValueError:
        return None
