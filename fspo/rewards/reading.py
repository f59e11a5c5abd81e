# ruff: noqa: RUF001
r"""From the text of an answer to its kind: one reading for the answer and for the ground truth.

:func:`cleaned` writes a text in one spelling: Unicode, dress, spaces and numbers. :func:`read` splits it into an
:class:`Answer`: a leaf (number or expression) with the words around it, a list, a relation, and so on. math-verify
parses the leaves (:mod:`fspo.rewards.judge`). A part that is left unread makes the kind UNREAD, unless it is words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

LEAF, WORDS, LIST, TUPLE, REGION, MATRIX, RATIO = "leaf", "words", "list", "tuple", "region", "matrix", "ratio"
RELATION, RESIDUE, UNREAD = "relation", "residue", "unread"

_W = "\x02"
"""Stands before every word of a text command and before a unit, so that no letter of them is a variable."""

#: Units that stand in an answer without a text command; scale words with what they multiply by.
_BARE_UNITS: Final = (
    "cm|mm|km|kg|mg|ml|mi|ft|in|lb|lbs|oz|hr|hrs|hours?|min|sec|mph|deg|degrees?|USD|EUR|GBP|"
    "Hz|kPa|Pa|kJ|MeV|eV|\\\\Omega"
)
_SCALES: Final = {
    "k": 1000,
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_BASES: Final = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_CONNECTING: Final = "an|the|is|are|be|was|equals?|and|or|about|approximately|exactly|only|so|of|to|in|by|mod"
#: Words after which a number is the answer; "not 5", "more than 5" and "minus 5" are not 5.
_BEFORE: Final = re.compile(
    r"(?:\A|\W)(?:is|are|be|was|equals?|about|approximately|exactly|only|so|Rs|USD|EUR|GBP|US|answer|total)\W*\Z|"
    r"[:,]\s*\Z",
    re.IGNORECASE,
)
#: Words that make another number of the one before them.
_AFTER: Final = re.compile(
    r"\b(?:than|times|plus|minus|not|root)\b|\b(?:\w*(?<!mon)ths?|\w{3,}(?:red|bled|bed|ved)|halves|thirds|"
    r"quarters|factorial)\b",
    re.IGNORECASE,
)

_SIGNS: Final = str.maketrans(
    dict.fromkeys("−–—‐‑‒﹣", "-") | dict.fromkeys("º˚", "°") | dict.fromkeys("·∙⋅", r" \cdot ")
    | dict.fromkeys("÷∕⁄", "/") | dict.fromkeys("≤⩽", r" \le ") | dict.fromkeys("≥⩾", r" \ge ")
    | dict.fromkeys("…⋯", "...") | dict.fromkeys("‘’′", "'")
    | {sign: f" \\{name} " for sign, name in zip(
        "×≠≈≡∞±∪∩∈∅∖∠Ω⟨⟩∨∧",
        "times ne approx equiv infty pm cup cap in emptyset setminus angle Omega langle rangle lor land".split(),  # noqa: SIM905
        strict=True,
    )}
    | {"。": ".", "、": ",", "ℝ": r"\mathbb{R}"}
)  # fmt: skip

#: Commands whose argument is not only dressed by them.
_MEANING: Final = (
    r"(?:frac|sqrt|binom|text\w*|mathrm|mbox|operatorname\*?|overline|bar|dot|vec|hat|widehat|overrightarrow|begin|end"
    r"|p?mod|bmod|mathbb|tag|[hv]space\*?|phantom|log|ln|exp|\w*cancel|sout|st|sinh?|cosh?|tanh?|cot|sec|csc"
    r"|arc\w+|max|min|gcd|lim|\w*color)"
)
_ARGUMENT: Final = r"\s*\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}"
_DRESS: Final = re.compile(
    rf"\\(?!{_MEANING}(?![a-zA-Z]))[a-zA-Z]{{2,}}(?:\s*\{{[a-zA-Z!]+\}}(?=\s*\{{))?{_ARGUMENT}(?!\s*\{{)"
)
_SWITCH: Final = re.compile(
    r"\\(?:(?:display|text|script)style|bf\w*|it\w*|rm|sf|tt|tiny|small|normalsize|large|Large|LARGE|huge|Huge|limits"
    r"|left\.?|right\.?|[bB]igg?[lrm]?|checkmark|blacksquare|square|nonumber|strut)(?![a-zA-Z])"
)
_TEXT: Final = re.compile(rf"\\(?:text\w*|mathrm|mbox|operatorname\*?){_ARGUMENT}")
_Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
_REWRITES: Final[_Rules] = (
    (r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1\\text{ \2}"),
    (r"\\not\s*=", r"\\ne "), (r"\\not\s*\\in(?![a-z])", r"\\notin "),
    (r"\\(?:begin|end)\s*\{(?:equation|align|aligned|gather|math|displaymath|center)\*?\}", " "),
    (r"(?:\\tag|\\label|\\[hv]space\*?|\\phantom|\\\w*color)\s*\{[^{}]*\}", " "),
    (r"(?:\b(?:US|USD)\s*)?\\?\$|\\[()\[\]](?!\d+pt)|`", ""),
    (r"\A\s*\*([^*]+)\*\s*\Z|\*\*([^*]+)\*\*|__([^_]+)__", lambda m: f" {next(filter(None, m.groups()))} "),
    (r"\*\*(?=\S)", "^"), (r"\*\*", ""), (r"\\\\\s*\[\s*\d+(?:\.\d+)?\s*\w\w\]", r"\\\\"),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\\enspace", " "), (r"\\!|\\n\Z", ""),
    (r"\\[dtc]?frac(?![a-z])|\\(?:nice|s)frac(?![a-z])", r"\\frac"),
    (r"\\[dt]?binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"), (r"\\[dt]binom", r"\\binom"),
    (r"\\langle(?![a-z])", "("), (r"\\rangle(?![a-z])", ")"),
    (r"\\le(?:q|qslant|qq)?(?![a-zA-Z])|<=", r"\\le "), (r"\\ge(?:q|qslant|qq)?(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\neq(?![a-zA-Z])|!=", r"\\ne "), (r"\\lt(?![a-zA-Z])", "<"), (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\varnothing", r"\\emptyset"), (r"\\[lc]?dots[a-z]?(?![a-z])", "..."), (r"\\ast(?![a-z])|\\cdotp", r"\\cdot "),
    (r"\\(?:lvert|rvert|mid|vert)(?![a-z])", "|"), (r"\\%|％", "%"), (r"\\_", "_"),
    (r"\\lg(?![a-z])", r"\\log_{10}"), (r"\{\s*\\rm(?![a-z])([^{}]*)\}", r"\\text{\1}"),
)  # fmt: skip
_DEGREES: Final = r"(?:\^\s*\{?\s*(?:\\circ|\\degree|o(?!\w))\s*\}?|°|\\degree)"
_ROOT: Final = r"(?:√\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+|\w))|(?<![\\a-zA-Z])sqrt\s*(?:\(([^()]*)\)|\{([^{}]*)\}))"
_NUMBER_FORMS: Final[_Rules] = (
    (r"\{\}", ""), (r"\{,\}", ","),
    (r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d+\}?)?)\s*(\(|\{)?\s*(-?\d{1,4}(?:\.\d{1,4})?)\s*"
     rf"{_DEGREES}\s*(\)|\}})?", lambda m: _radians(m)),
    (rf"(?<=[\d.)\s\}}])\s*{_DEGREES}", f" {_W}degrees "),
    (r"%|(?<![a-zA-Z])per\s?cent(?![a-zA-Z])", f" {_W}percent "),
    (rf"(?<=\d)\s*(?<![a-zA-Z])({_BARE_UNITS})(?![a-zA-Z])|(?<=\d)\s+([mgsLNJWVK])(?=/|\Z)",
     lambda m: f" {_W}{m[1] or m[2]}"),
    (rf"({_W}\w+)\s*/\s*([a-zA-Z]+)", rf"\1/{_W}\2"),
    (r"(?<![\w.,(\[{])(\d{1,3}(?:([, '])\d{3})(?:\2\d{3})*)(?![\d])", lambda m: re.sub(r"[, ']", "", m[1])),
    (r"(?<=\d) ?[eE]([+-]?)0*(\d+)(?!\d|\.\d)", lambda m: f" \\cdot 10^{{{m[1].strip('+')}{m[2]}}}"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"), (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"\\frac\s*([a-zA-Z])\s*", r"\\frac{\1}"), (r"(\\frac" + _ARGUMENT + r")\s*([a-zA-Z\d])", r"\1{\3}"),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"), (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\A([^{}]*)\\choose([^{}]*)\Z", r"\\binom{\1}{\2}"),
    (rf"{_W}?\bC\s*_\{{?(\d+)\}}?\^\{{?(\d+)\}}?|_\{{?(\d+)\}}?\s*C\s*_\{{?(\d+)\}}?", lambda m: _binomial(m)),
    (r"(?<=[\d)])\s*(?=\\binom)", r" \\cdot "),
    (_ROOT + r"|\\sqrt\s*\(([^()]*)\)|\\sqrt\s*(\w)",
     lambda m: f"\\sqrt{{{next(part for part in m.groups() if part is not None)}}}"),
    (r"(?<![\w.}])(\d+)\s+(\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.}])(\d{1,9})\s*\\frac\s*\{(\d{1,9})\}\s*\{([1-9]\d{0,8})\}",
     lambda m: f"\\frac{{{int(m[1]) * int(m[3]) + int(m[2])}}}{{{m[3]}}}"),
    (r"(?<![\w.])(\d*)\.(\d*?)(\d{1,6}?)\3{2,}(?:\.\.\.)", r"\1.\2\\overline{\3}"),
    (r"(?<![\d.])(\d{0,9})\.(\d{0,6})\\(?:overline|bar|dot)\s*\{?(\d{1,6})\}?(?:\.\.\.)?(?!\d)",
     lambda m: _repeating(*m.groups())),
    (r"(?<=\d)(?:\.\.\.)", ""), (r"\*", r" \\cdot "), (r"\)\s*\(", r") \\cdot ("),
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What an answer is. ``parts`` are those of a collection or the sides of a relation, ``text`` is a leaf's."""

    kind: str
    text: str = ""
    parts: tuple[Answer, ...] = ()
    form: str = ""  # brackets, sign of a relation, environment of a matrix
    words: str = ""  # beside a leaf: its unit, or what it counts


def _fraction(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return f"{value}" if value.denominator == 1 else f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _repeating(whole: str, fixed: str, cycle: str) -> str:
    nines = 10 ** len(fixed) * (10 ** len(cycle) - 1)
    return _fraction(Fraction(int(whole + fixed + cycle) - int(whole + fixed or 0), nines))


def _binomial(match: re.Match[str]) -> str:
    above, below = filter(None, match.groups())
    return f"\\binom{{{above}}}{{{below}}}"


def _radians(match: re.Match[str]) -> str:
    function, opened, angle, closed = match.groups()
    value = Fraction(angle) / 180
    written = f"{function}(\\frac{{{value.numerator}\\pi}}{{{value.denominator}}})"
    return written if bool(opened) == bool(closed) else match[0]


def _plain_signs(text: str) -> str:
    """NFKC and the usual signs, once. Superscripts, subscripts and vulgar fractions keep what they mean."""

    def script(match: re.Match[str]) -> str:
        sign = "^" if "<super>" in unicodedata.decomposition(match[0][0]) else "_"
        return f"{sign}{{{unicodedata.normalize('NFKC', match[0])}}}"

    def letter(match: re.Match[str]) -> str:
        if unicodedata.category(match[0]) == "Cf":
            return ""
        if unicodedata.category(match[0]) == "Sc" and match[0] != "$":
            return " "
        if (digit := unicodedata.decimal(match[0], None)) is not None:
            return str(digit)
        name = unicodedata.name(match[0], "")
        greek = re.fullmatch("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", name)
        if greek is None:
            parts = unicodedata.normalize("NFKC", match[0]).partition("⁄")
            return f" \\frac{{{parts[0]}}}{{{parts[2]}}}" if parts[1] and parts[2] else match[0]
        return f"\\{greek[2].lower() if greek[1] == 'SMALL' else greek[2].capitalize()} ".replace(
            "LAMDA", "lambda"
        ).replace("lamda", "lambda")

    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+|[₀-₉]+", script, text.translate(_SIGNS))
    return unicodedata.normalize("NFKC", re.sub(r"[^\x00-\x7f]", letter, text)).translate(_SIGNS)


def _text(match: re.Match[str]) -> str:
    """The content of a text command: marked words, and whatever else stands there as it is."""
    content = match[1]
    if re.fullmatch(r"\s*[eid]\s*", content):
        return content
    if content.strip() in ("arctan", "arcsin", "arccos", "arccot", "lcm"):
        return f"\\{content.strip()} "
    if not content.strip(" ,."):
        return content
    inside = re.search(r"[_^]\s*\{?\s*\Z", match.string[: match.start()])
    words = (
        content if inside else re.sub(r"(?<![\\a-zA-Z])[^\W\d_]+(?:['-][^\W\d_]+)*", lambda m: f"{_W}{m[0]}", content)
    )
    return f" {words} " if not inside else words


def cleaned(text: str) -> str:
    """One spelling of an answer."""
    text = _plain_signs(text)
    for pattern, by in _REWRITES:
        text = re.sub(pattern, by, text)
    text, before = _SWITCH.sub(" ", text), ""
    while text != before:
        before = text
        text = _DRESS.sub(lambda m: m[1] if re.fullmatch(r"\s*-?[\w.,]*\s*|.*[\x02\\].*", m[1]) else f"({m[1]})", text)
        text = _TEXT.sub(_text, text)
        text = re.sub(r"</?[a-zA-Z]\w*>|<\|\w+\|>", " ", text)
    text = re.sub(r"(?<=(?<!\\)\{)\s+|\s+(?=\})(?!\\\})|(?<=\})\s+(?=\{)|(?<=[\^_])\s+|\s+(?=[\^_])", "", text)
    text = re.sub(r"(\\(?:frac|sqrt|binom|overline))\s+(?=\{)", r"\1", text)
    for pattern, by in _NUMBER_FORMS:
        text = re.sub(pattern, by, text)
    return _stripped(text)


def _stripped(text: str) -> str:
    """Without punctuation, spaces and braces around it."""
    before = None
    while text != before:
        before = text
        text = re.sub(r"\A(?:[\s,;:=~*]|\\approx|\\\\)+|(?:[\s,;:~*_]|(?<!\.)\.|\\\\|\\\Z)+\Z", "", text)
        if text[:1] == "{" and text[-1:] == "}" and _closes(text, 0) == len(text) - 1:
            text = text[1:-1]
    return text


def _closes(text: str, opening: int) -> int | None:
    r"""Where the bracket at ``opening`` is closed; brackets of intervals may differ."""
    depth = 0
    for match in re.compile(r"[{(\[]|[})\]]").finditer(text, opening):
        depth += 1 if match[0] in "{([" else -1
        if depth == 0:
            return match.start()
    return None


def split(text: str, separator: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """The parts of a text between separators outside of all brackets, each with the separator before it."""
    depth, start, before = 0, 0, ""
    bracket = re.compile(rf"(?P<open>[{{(\[]|\\begin)|(?P<close>[}})\]]|\\end)|(?P<separator>{separator.pattern})")
    for match in bracket.finditer(text):
        if match["separator"] is None:
            depth += 1 if match["open"] else -1
        elif depth == 0:
            yield text[start : match.start()], before
            start, before = match.end(), match["separator"].strip()
    yield text[start:], before


#: "where n = 3", after an answer.
_CONDITION: Final = re.compile(
    rf"(?<=[\s\w)}}])[,;(]?\s*{_W}?\b(?:for|where|with|when|if|at|attained|provided)\b"
    rf"((?:(?!{_W}?\b(?:and|or)\b)[^,;])*)\Z"
)
#: "where k is in Z", after an answer.
_DOMAIN: Final = re.compile(
    rf"(?:[,;(]|\s{_W}?(?:for|where|with|when|if)\b(?:\s+{_W}?(?:all|any|some|every|each))?)\s*"
    r"(?:[\w, ]|\\(?!in\b)[a-z]+)+?\\in\s*(\\mathbb.*)\Z"
)
_ITEMS: Final = re.compile(rf"[,;&]|{_W}?(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|\\lor|\\land|{_W}?as well as")
_ITEMS_OF_PAIR: Final = re.compile(r"[,;]")
_RELATIONS: Final = re.compile(
    r"\\(?:le|ge|ne|in|notin|equiv|approx|sim|lesssim|gtrsim|ll|gg|subset\w*|to|propto)(?![a-zA-Z])|[=<>]"
)
_WORD: Final = (
    rf"(?:{_W}[^\W\d_]+\.?(?:\s*\^\s*\{{?-?\d\}}?)?|{_W}\\Omega|(?<![^\s(\"'])"
    rf"(?:(?:{_CONNECTING}|a(?=\s+{_W}?[^\W\d_]{{3}})|[^\W\d_]{{3,}})(?=[\s.,:;!?)\"'-]|\Z)))"
)
_WORDS: Final = re.compile(rf"{_WORD}(?:(?:\s|[/.:,;!?'\"-]|\\cdot|\(\s*(?={_W}))*{_WORD})*[\s.:,]*\)?", re.IGNORECASE)
_MATHS: Final = re.compile(r"\d|[-+=<>^*/\\]|(?<![a-zA-Z])[a-zA-Z]{1,2}(?![a-zA-Z])")
_DIGIT_OR_SIGN: Final = re.compile(r"[\d=<>+*/^]|\\(?!Omega)")
_NAME: Final = re.compile(
    r"(?!\\(?:sin|cos|tan|cot|sec|csc|log|ln|sqrt|frac|exp|pi)(?![a-zA-Z])|e\Z)"
    r"(?:\\?#|\\(?:angle|triangle|det|dim|deg|bar|overline|vec|hat|Delta)\s*\{?\s*)?"
    r"(?:[a-zA-Z]+|\\[a-zA-Z]+|\|[A-Z]{2}\||[a-zA-Z]\^\{?-1\}?|\([a-zA-Z](?:,\s*[a-zA-Z])+\))\}?"
    r"(?:_\{?\w+\}?|_\{[^{}]*\})?'*\s*(?:\([^()]*\))?"
)
_MATRIX: Final = re.compile(r"\\begin\s*\{([pbBvV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_RESIDUE: Final = re.compile(
    rf"(.+?)\s*(?:\\pmod|\(?\s*(?:\\[bp]?mod(?![a-z])|{_W}?mod(?![a-z])|{_W}?modulo))\s*\{{?\s*(\d+)\s*\}}?\s*\)?"
)


def read(text: str, inner: bool = False) -> Answer:
    """The kind of a cleaned text."""
    text = _stripped(text)
    if match := _MATRIX.fullmatch(text):
        rows = [re.split("&", row) for row in re.split(r"\\\\", match[2].strip().removesuffix("\\\\"))]
        cells = tuple(Answer(TUPLE, parts=tuple(read(cell, True) for cell in row)) for row in rows)
        return Answer(MATRIX, text, cells, "v" if match[1] == "vmatrix" else "")
    if (match := _RESIDUE.fullmatch(text)) and not re.search(r"[,;]", match[1]):
        value = re.split(r"\\equiv|=", match[1])[-1]
        return Answer(RESIDUE, parts=(read(value, True), read(match[2])))
    if not inner:
        if (domain := _DOMAIN.search(text)) and domain.start():
            text = _stripped(text[: domain.start()])
        if (
            (condition := _CONDITION.search(text))
            and _RELATIONS.search(condition[1])
            and re.search(r"\w", text[: condition.start()])
        ):
            text = _stripped(text[: condition.start()])
        pieces = list(split(text, _ITEMS))
        items = [item for item, _ in pieces]
        if len(items) > 1:
            if any(
                separator.endswith("or") and (not items[number + beside].strip() or _is_remark(items[number + beside]))
                for number, (_, separator) in enumerate(pieces)
                for beside in (-1, 0)
            ):
                return Answer(UNREAD, text)  # "no solution or 5"
            collected = _list(items)
            return replace(collected, text=text) if collected.kind == LIST else collected
    if re.search(r"\\(?:cup|cap|setminus|mathbb|emptyset)(?![a-z])|\\\{.*[|:].*\\\}", text):
        return _region(text)
    if re.search(r"\\(?:pm|mp)(?![a-z])", text):
        both = (
            re.sub(r"\\pm(?![a-z])", "+", text).replace("\\mp", "-"),
            re.sub(r"\\pm(?![a-z])", "-", text).replace("\\mp", "+"),
        )
        return Answer(LIST, parts=tuple(read(side, inner) for side in both))
    if match := re.fullmatch(r"\](.*)\[", text):
        text = f"({match[1]})"
    if (text[:2] == r"\{" or text[:1] in "([") and _closes(
        text, text.index(text[1] if text[0] == "\\" else text[0])
    ) == len(text) - 1:
        if text[0] == "\\":
            return (
                _list([item for item, _ in split(text[2:-2], _ITEMS)], "{}")
                if text[2:-2].strip()
                else _region("\\emptyset")
            )
        items = [item for item, _ in split(text[1:-1], _ITEMS_OF_PAIR)]
        if len(items) > 1:
            return Answer(TUPLE, text, tuple(read(item, True) for item in items), text[0] + text[-1])
        if text[0] + text[-1] in ("()", "[]"):
            return read(text[1:-1])
    if re.fullmatch(r"\s*\d+(?:\s*:\s*(?:\d+|\.\.\.))+.*", text):
        return Answer(RATIO, parts=tuple(_leaf(part) for part in text.split(":")))
    sides = list(split(text, _RELATIONS))
    if len(sides) > 1:
        return _relation(sides)
    return _leaf(text)


def _region(text: str) -> Answer:
    _, _, last = text.rpartition("\\in ") if re.match(r"\s*[a-zA-Z]\s*\\in ", text) else ("", "", text)
    return Answer(REGION, last.strip())


def _list(items: list[str], form: str = "") -> Answer:
    """A list or set. Remarks beside its items, words or a condition ("where n = 3"), do not count."""
    items = [item for item in map(_stripped, items) if item]
    remarks = {item for item in items if _is_remark(item)}
    items = [item for item in items if item not in remarks] or items
    items = [item for number, item in enumerate(items) if not number or not _is_condition(item)]
    parts: list[Answer] = []
    for part in map(read, items):
        parts += part.parts if part.kind == LIST and not part.form else [part]
    return parts[0] if len(parts) == 1 and not form else Answer(LIST, parts=tuple(parts), form=form)


def _is_remark(item: str) -> bool:
    rest = _WORDS.sub(" ", item)
    return rest != item and not _DIGIT_OR_SIGN.search(rest)


def _is_condition(item: str) -> bool:
    words = _WORDS.match(item)
    sides = _RELATIONS.split(item[words.end() :]) if words else []
    return len(sides) > 1 and bool(sides[0].strip())


def _relation(sides: list[tuple[str, str]]) -> Answer:
    signs = [sign for _, sign in sides[1:]]
    texts = [_stripped(side) for side, _ in sides]
    if signs[-1] in ("\\approx", "\\sim"):
        return (
            read(texts[-1])
            if len(texts) == 2 and _is_name(texts[0])
            else read(" ".join(texts[:1]) if len(texts) == 2 else "=".join(texts[:-1]))
        )
    if signs == ["\\in"] and _is_name(texts[0]):
        return read(texts[1])
    if any(not side for side in texts):
        return Answer(RELATION, "".join(sign + side for side, sign in sides), form=signs[0])
    if set(signs) == {"="}:
        if _is_name(texts[0]) and len(texts) == 2:
            return Answer(RELATION, "=".join(texts), tuple(map(read, texts[1:])), f"{_stripped(texts[0])}=")
        if _is_name(texts[1]) and len(texts) == 2 and not re.search("[a-zA-Z]", texts[0].replace("\\", " ")):
            return read(texts[0])
    return Answer(
        RELATION,
        " ".join(f"{sign} {side}" for side, sign in zip(texts, ["", *signs], strict=True)).strip(),
        tuple(_leaf(side) for side in texts),
        " ".join(signs),
    )


def _is_name(text: str) -> bool:
    words = _WORDS.sub(" ", text).strip()
    return bool(_NAME.fullmatch(words or "x")) or (bool(_NAME.fullmatch(text.replace(_W, "").strip())))


def _leaf(text: str) -> Answer:
    """A number or expression with the words around it, or words."""
    text = re.sub(r"(?<=\S)\s+\([^()]*[=<>][^()]*\)\Z", "", text)
    text = (
        re.sub(
            rf"\(\s*(?:\\approx[^()]*|\w\s*\\in[^()]*|(?:{_W}|[^\W\d_]{{3}})(?:[^\d()]*|[^()]*[=<>][^()]*))\)\s*\Z",
            "",
            text,
        ).strip()
        or text
    )
    runs, words, end = [], [], 0
    for match in _WORDS.finditer(text):
        runs.append(text[end : match.start()])
        words.append(match[0])
        end = match.end()
    runs = [run.strip(" ,.:;!?'\"()") if words else run for run in [*runs, text[end:]]]
    maths = [
        number for number, run in enumerate(runs) if _MATHS.search(run) and not (words and re.fullmatch(r"[aAI]", run))
    ]
    if not maths:
        letters = text.replace(_W, "").strip()
        return Answer(WORDS if letters else UNREAD, " ".join(letters.split()))
    if len(maths) > 1:
        later = text.split(runs[maths[0]], 1)[-1]
        numbers = [
            number for number in maths if re.search(r"\d", runs[number]) or re.search(r"[=<>+*/^\\]", runs[number])
        ]
        if len(numbers) > 1 and not (numbers == maths and len(maths) == 2 and _RELATIONS.search(runs[maths[1]])):
            return Answer(UNREAD, later)
        maths = numbers or maths
    number = maths[0]
    if number and not _BEFORE.search(words[number - 1].replace(_W, "") + ("" if not runs[number - 1] else " x")):
        return Answer(UNREAD, text)
    later = words[number].replace(_W, "") if number < len(words) else ""
    if _AFTER.search(later) or (
        any(_MATHS.search(run) for run in runs[number + 1 :]) and not re.match("for|where|with|when|if|at", later)
    ):
        return Answer(UNREAD, text)
    unit = " ".join(re.sub(rf"[{_W}.,:;()!?'\"]", " ", words[number]).split()) if number < len(words) else ""
    return Answer(LEAF, runs[number].strip(), words=unit)


def choice(text: str, with_text: bool = False) -> str:
    """The letters of a choice, such as C, (C) or A, C; with its text, as in (C) 12, if ``with_text``. Empty if none."""
    text = text.replace(_W, "").strip()
    text = re.sub(r"\A(?:option|choice|answer)s?\s*:?\s*(?=\(?[A-Z])", "", text, flags=re.IGNORECASE)
    match = re.match(r"\(?([A-Z](?:\s*(?:,|and|,\s*and)?\s*[A-Z])*)(?![\w'])(\)?[.:)]*)\s*", text)
    if match is None or len(match[1]) > 20:
        return ""
    rest = text[match.end() :]
    if rest and (
        not (with_text and match[2]) or re.match(r"(?:and|or|,|\\cdot)", rest) or re.search(r"\([A-Z]\)", rest)
    ):
        return ""
    letters = re.sub("[^A-Z]", "", match[1])
    if letters == match[1] and list(letters) != sorted(letters):
        return ""  # an order
    return "".join(sorted(letters))


def based(text: str) -> tuple[int, int] | None:
    """Value and base of a number such as 52_8 or 1A_{16}; None of anything else."""
    match = re.fullmatch(rf"([0-9A-F]+)\s*_\s*\{{?\s*\(?\s*{_W}?(\w+)\s*\)?\s*\}}?", text.strip())
    if match is None or not (match[1][0].isdigit() or (match[2].isdigit() and int(match[2]) == 16)):
        return None
    names = _BASES.split()
    base = int(match[2]) if match[2].isdigit() else names.index(match[2].lower()) if match[2].lower() in names else 0
    try:
        return (int(match[1], base), base) if 2 <= base <= 36 else None
    except ValueError:
        return None
