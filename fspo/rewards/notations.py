r"""Notations of mathematical answers, each turned into one that math-verify reads: see `normalise`."""

from __future__ import annotations

import re
from fractions import Fraction

from fspo.rewards.extraction import closing_brace

INTEGER_PARAMETER = "kappa"
r"""Symbol that stands for the parameter of a family over all integers; `\kappa` in LaTeX."""

_WRAPPERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$([^$]+)\$",
        r"\\\((.+)\\\)",
        r"\*\*([^*]+)\*\*",
        r"\*([^*]+)\*",
        r"`([^`]+)`",
        r"<(?:b|i|strong|em)>([^<]+)</(?:b|i|strong|em)>",
    )
)
_STYLE = re.compile(
    r"\\(?:underline|emph|uline|bm|boldsymbol|text(?:tt|sf|sl|sc|up|color\s*\{\w+\})|color\s*\{\w+\})\s*(?=\{)"
)
_SIZE = re.compile(
    r"\A(?P<brace>\{?)\s*\\(?:bf|it|rm|displaystyle|textstyle|small|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])\s*"
)
_LABEL = re.compile(
    r"\\(?:text|textbf|mathrm)\s*\{\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*\}\s*:?", re.IGNORECASE
)
_END = re.compile(
    r"(?:[\s,;:~\u3002\uff0c]|(?<![.])[.](?![.])|\\[ ,;:!]|\\\\|\\q?quad(?![a-zA-Z])|\\text\s*\{[\s.,;:]*\}|\\\Z)+\Z"
)
_START = re.compile(r"\A(?:[\s=:~]|\\[ ,;:!])+")

_NUMBER = re.compile(
    r"(?P<sign>-?)(?:(?P<decimal>\d{1,12}(?:\.\d{1,12})?|\.\d{1,12})(?:/(?P<slash>\d{1,6}))?"
    r"|(?P<whole>\d{0,6})\\[dt]?frac\{(?P<p>\d{1,6})\}\{(?P<q>\d{1,6})\})"
)
_MIXED = re.compile(r"(-?\d{1,6}) +(\d{1,6})/(\d{1,6})")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?")
_LOOSE_SPACES = re.compile(r"(?<![\d ]) +| +(?![\d ])")  # one between two digits may separate two numbers

SPACES = re.compile(r"(?:\\[ ,;:!]|~|\\q?quad(?![a-zA-Z])|\s)+")


def cleaned(text: str) -> str:
    """Without style, wrapping signs and punctuation around it."""
    before = None
    while text != before:
        before = text
        text = _SIZE.sub(r"\g<brace>", _STYLE.sub("", _LABEL.sub("", text))).strip()
        if not re.search(r"\\(?:left|right)\s*\.\Z|\\dots\Z|\\ldots\Z|\\cdots\Z", text):
            text = _END.sub("", text)
        text = _START.sub("", text)
        for wrapper in _WRAPPERS:
            if match := wrapper.fullmatch(text):
                text = match[1].strip()
        if text[:1] == "{" and closing_brace(text, 0) == len(text) - 1:
            text = text[1:-1].strip()
    return text


def braced(text: str) -> str:
    r"""With `\frac{1}{2}` for `\frac12`: without braces a digit is all of a numerator or denominator."""
    text = re.sub(r"(\\[dt]?frac)\s*(\d)", r"\1{\2}", text)
    return re.sub(r"(\\[dt]?frac\{\d+\})\s*(\d)", r"\1{\2}", text)


def number(text: str) -> Fraction | None:
    """The exact value of an integer (also 3,000), a decimal, a fraction or a mixed number (also 1 1/2)."""
    if mixed := _MIXED.fullmatch(text):
        text = f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    match = _NUMBER.fullmatch(_LOOSE_SPACES.sub("", text))
    if match is None or int(match["slash"] or match["q"] or 1) == 0:
        return None
    if match["p"]:
        value = int(match["whole"] or 0) + Fraction(int(match["p"]), int(match["q"]))
    else:
        value = Fraction(match["decimal"]) / int(match["slash"] or 1)
    return -value if match["sign"] else value


def written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


_LESS = {"<": "<", "\\lt": "<", "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=", "≤": "<="}
_MORE = {">": ">", "\\gt": ">", "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "≥": ">="}
_NOT_EQUAL = {"\\ne": "!=", "\\neq": "!=", "≠": "!="}
_SIGNS = _LESS | _MORE | _NOT_EQUAL
_SIGN = re.compile(r"(\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt|neq|ne)(?![a-zA-Z])|[<>≤≥≠])")
_CONDITION = re.compile(rf"{_SIGN.pattern}|\\in(?![a-zA-Z])|\\setminus|\\backslash|\A\]|\+\\infty")
_VARIABLE = re.compile(r"[a-zA-Z]|[a-z]\([a-z]\)|\\(?:theta|alpha|beta|lambda|mu)")
_BOUND = re.compile(r"(?:(?!\\in(?![a-zA-Z])|\\text)[^,;=])+")
_LEFT_RIGHT = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?=[\s()\[\]|\\{}])")
_SET = re.compile(
    r"\\\{\s*(?P<x>[a-zA-Z])\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?|\\R)\s*)?(?:\\mid|\||:|\\colon|,)(?P<condition>.+)\\\}"
)
_ELEMENT = re.compile(r"(?P<x>[a-zA-Z])\s*\\in\s*(?P<set>[\[\](\\].*)")
_WITHOUT = re.compile(r"(?:\\mathbb\s*\{?R\}?|\\R)\s*(?:\\setminus|\\backslash|-)\s*\\\{(?P<value>[^,{}]+)\\\}")
_OR = re.compile(r"\\(?:text|mathrm)\s*\{\s*or\s*\}|\\lor(?![a-zA-Z])|\\vee(?![a-zA-Z])|\bor\b")
_AND = re.compile(r"\\(?:text|mathrm)\s*\{\s*and\s*\}|\\land(?![a-zA-Z])|\\wedge(?![a-zA-Z])|\band\b")
_INTERVALS = re.compile(r"[\[(][^,\[\]]+,[^,\[\]]+[\])](?:\\cup[\[(][^,\[\]]+,[^,\[\]]+[\])])*")


def interval(answer: str, truth: str) -> tuple[str, str] | None:
    """Both sides as intervals, if at least one is an inequality or a set of numbers with a condition."""
    if not any(_CONDITION.search(text) for text in (answer, truth)):
        return None
    found, target = _as_interval(answer), _as_interval(truth)
    if found is None or target is None or (found[1] and target[1] and found[1] != target[1]):
        return None
    return found[0], target[0]


def _as_interval(text: str) -> tuple[str, str] | None:
    """A union of intervals, and the variable of the inequality that it was written as, if any."""
    text = _LEFT_RIGHT.sub("", text).strip()
    variable = ""
    if match := _SET.fullmatch(text):
        text, variable = match["condition"].strip(), match["x"]
    elif match := _ELEMENT.fullmatch(text):
        text, variable = match["set"], match["x"]
    if match := _WITHOUT.fullmatch(text):
        return _around(match["value"]), variable
    if not _SIGN.search(text):
        text = SPACES.sub("", text).replace("+\\infty", "\\infty")
        if match := re.fullmatch(r"\]([^,\[\]]+),([^,\[\]]+)\[", text):
            text = f"({match[1]},{match[2]})"
        return (text, variable) if _INTERVALS.fullmatch(text) else None
    parts = []
    for clause in _OR.split(text):
        part = _clause(clause)
        if part is None or (variable and part[1] != variable):
            return None
        variable = part[1]
        parts.append(part[0])
    return "\\cup".join(parts), variable


def _around(value: str) -> str:
    return f"(-\\infty,{value})\\cup({value},\\infty)"


def _clause(clause: str) -> tuple[str, str] | None:
    """A chain of inequalities, or two joined by "and", as one interval and its variable."""
    lower: tuple[str, str] | None = None
    upper: tuple[str, str] | None = None
    variable = ""
    for relation in _AND.split(clause):
        pieces = [piece.strip() for piece in _SIGN.split(relation)]
        if len(pieces) == 5 and len({sign in _LESS for sign in pieces[1::2]}) == 1:
            middle = pieces[2]
            pairs = [(pieces[0], pieces[1], middle), (middle, pieces[3], pieces[4])]
        elif len(pieces) == 3:
            pairs = [(pieces[0], pieces[1], pieces[2])]
        else:
            return None
        for left, sign, right in pairs:
            flipped = _VARIABLE.fullmatch(right) is not None and _VARIABLE.fullmatch(left) is None
            name, value = (right, left) if flipped else (left, right)
            absolute = re.fullmatch(r"\|\s*([a-zA-Z])\s*\|", name)
            name = absolute[1] if absolute else name
            if not _VARIABLE.fullmatch(name) or not _BOUND.fullmatch(value) or variable not in ("", name):
                return None
            variable, kind = name, _SIGNS[sign]
            if flipped:
                kind = kind.translate(str.maketrans("<>", "><"))
            if kind == "!=":
                return (_around(value), variable) if clause == relation and not absolute and len(pairs) == 1 else None
            if absolute:
                if "<" not in kind or not (number(value) or 0) > 0 or clause != relation:
                    return None
                return (f"(-{value},{value})" if kind == "<" else f"[-{value},{value}]"), variable
            if "<" in kind:
                if upper is not None:
                    return None
                upper = (value, "]" if "=" in kind else ")")
            else:
                if lower is not None:
                    return None
                lower = (value, "[" if "=" in kind else "(")
    low, opening = lower or ("-\\infty", "(")
    high, closing = upper or ("\\infty", ")")
    return f"{opening}{low},{high}{closing}", variable


_DECLARED = re.compile(
    r"(?:[\s,;(]|\\[ ,;]|\\q?quad|\\text\s*\{[\s,]*(?:(?:where|for|with|for all|for any|any)[\s$]*)?\}|\\forall)+"
    r"(?<![a-zA-Z\\])(?P<names>[a-zA-Z](?:_\d)?(?:\s*,\s*[a-zA-Z](?:_\d)?)*)\s*"
    r"(?:\\in\s*\\?(?:mathbb\s*\{?)?(?P<set>[ZR])\}?"
    r"|\\text\s*\{\s*(?:is|are)\s+(?:an\s+|any\s+)?(?P<word>integer|real)s?(?:\s+numbers?)?\s*\}"
    r"|=\s*0\s*,\s*\\pm\s*1\s*,\s*\\pm\s*2\s*,\s*\\[lc]?dots)\s*\)?"
)
_IN_TEXT = re.compile(
    r"\\text\s*\{[\s,]*(?:where|for|with|for all|for any)\s+\$?(?P<name>[a-zA-Z])\$?\s*is\s+an?y?\s+"
    r"(?P<word>integer|real(?:\s+number)?)\s*\}"
)
_LONE_LETTER = re.compile(r"(?<![\\a-zA-Z_{])([a-zA-Z])(?![a-zA-Z_])|(?<=\{)([a-zA-Z])(?=[^a-zA-Z_])")


def family(answer: str, truth: str) -> tuple[str, str] | None:
    """Families over all integers or real numbers, without the statement of it and with one name for the parameter."""
    if not any(word in text for text in (answer, truth) for word in ("\\in", "integer", "real", "\\pm")):
        return None
    if _SIGN.search(answer) or _SIGN.search(truth):
        return None  # a condition, not a family: 2 <= x <= 5 for integers x
    found, target = _declaration(answer), _declaration(truth)
    domains = {domain for _, _, domain in (found, target) if domain}
    if len(domains) != 1:
        return None
    bodies, names = [], []
    for body, declared, _ in (found, target):
        side = body.rpartition("=")[2].strip() if re.match(r"[a-z]\s*=", body) else body
        letters = {a or b for a, b in _LONE_LETTER.findall(side)} - {"e", "i"}
        if not declared and len(letters) == 1 and not letters & {"x", "y", "z"}:
            declared = tuple(letters)
        bodies.append(side)
        names.append(declared)
    if all(len(each) == 1 for each in names):
        symbol = f"\\{INTEGER_PARAMETER} " if domains == {"Z"} else names[1][0]
        bodies = [_renamed(body, each[0], symbol) for body, each in zip(bodies, names, strict=True)]
    return bodies[0], bodies[1]


def _declaration(text: str) -> tuple[str, tuple[str, ...], str]:
    """The text before "k in Z", the names declared there, and their domain; nothing declared: no names."""
    for pattern in (_IN_TEXT, _DECLARED):
        for match in pattern.finditer(text):
            if match.end() == len(text) and match.start() > 0:
                found = match.groupdict()
                names = tuple(re.split(r"\s*,\s*", found.get("names") or found["name"]))
                real = (found.get("set") or "Z") == "R" or (found.get("word") or "").startswith("real")
                return cleaned(text[: match.start()]), names, "R" if real else "Z"
    return text, (), ""


def _renamed(text: str, name: str, symbol: str) -> str:
    pattern = rf"(?<![\\a-zA-Z_]){re.escape(name)}(?![a-zA-Z_])"
    return re.sub(pattern, lambda _: symbol, text)


_TRIG_DEGREES = re.compile(
    r"(?P<function>\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d+\}?)?)\s*"
    r"(?P<open>\(|\\left\(|\{)?\s*(?P<angle>-?\d{1,4}(?:\.\d{1,4})?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*"
    r"(?P<close>\\right\)|\)|\})?"
)
_DEGREES = re.compile(r"(-?\d{1,4}(?:\.\d{1,4})?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|\\text\s*\{\s*degrees\s*\})")
_RADIANS = re.compile(r"\s*\\text\s*\{\s*rad(?:ians?)?\s*\}\Z")
_GROUPS = re.compile(r"(?<![\d.])(\d{1,3})((?:\\[,! ]\d{3})+)(?!\d)")
_LARGE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\\[ ,])*\\text\s*\{\s*(thousand|million|billion)\s*\}")
_POWERS = {"thousand": 3, "million": 6, "billion": 9}
_REPEATING = re.compile(
    r"(?<![\d.])(\d{1,6})\.(\d{0,6})(?:\\overline\s*\{?(\d{1,6})\}?|\\dot\s*\{?(\d)\}?(?:(\d{0,5})\\dot\s*\{?(\d)\}?)?)(?!\d)"
)
_ODD_ROOT = re.compile(r"\\sqrt\s*\[\s*(\d*[13579])\s*\]\s*\{\s*-\s*(\d+)\s*\}")
_CHOOSE = (
    re.compile(r"(?<![a-zA-Z\\])C\s*\(\s*(?P<n>\d{1,4})\s*,\s*(?P<k>\d{1,4})\s*\)"),
    re.compile(r"(?:\{\}_\{?(?P<n>\d{1,4})\}?\s*)C_\{?(?P<k>\d{1,4})\}?"),
    re.compile(r"(?<![a-zA-Z\\}])C_\{?(?P<n>\d{1,4})\}?\^\{?(?P<k>\d{1,4})\}?"),
)


def closed_form(answer: str, truth: str) -> tuple[str, str] | None:
    """Notations that math-verify does not read: degrees, repeating decimals, odd roots of negative numbers, others."""
    sides = [_notation(_RADIANS.sub("", answer)), _notation(_RADIANS.sub("", truth))]
    if "C" not in truth:  # else it may be the name of a point or a constant
        for pattern in _CHOOSE:
            sides[0] = pattern.sub(r"\\binom{\g<n>}{\g<k>}", sides[0])
    if (number(truth) or 0) >= 1000:  # else the answer may be meant in thousands or millions
        sides[0] = _LARGE.sub(lambda match: f"{match[1]}\\cdot 10^{{{_POWERS[match[2]]}}}", sides[0])
    degrees = [_DEGREES.fullmatch(side) for side in sides]
    for this, other in ((0, 1), (1, 0)):
        angle = degrees[this]
        if angle and not degrees[other] and "\\pi" in sides[other] and not _DEGREES.search(sides[other]):
            sides[this] = _radians(angle[1])
    return (sides[0], sides[1]) if sides != [answer, truth] else None


def _notation(text: str) -> str:
    def trig(match: re.Match[str]) -> str:
        if bool(match["open"]) != bool(match["close"]):
            return match[0]
        return f"{match['function']}\\left({_radians(match['angle'])}\\right)"

    def repeating(match: re.Match[str]) -> str:
        fixed = match[2]
        cycle = match[3] or match[4] + (match[5] or "") + (match[6] or "")
        nines = 10 ** len(fixed) * (10 ** len(cycle) - 1)
        return written(Fraction(int(match[1] + fixed + cycle) - int(match[1] + fixed), nines))

    text = _TRIG_DEGREES.sub(trig, text)
    text = _GROUPS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = _REPEATING.sub(repeating, text)
    text = _ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", text)
    if re.fullmatch(r"\(-\\sqrt\[\d+\]\{\d+\}\)", text):
        text = text[1:-1]
    text = text.replace("\\operatorname{arccot}", "\\arccot")
    return text.replace("\\varnothing", "\\emptyset").replace("°", "^{\\circ}")


def _radians(degrees: str) -> str:
    value = Fraction(degrees) / 180
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}\\pi}}{{{value.denominator}}}"
