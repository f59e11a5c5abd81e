# ruff: noqa: RUF001
r"""The text of an answer or of a ground truth in one spelling.

:func:`cleaned` puts words between marks, so that no letter of them is a variable, and writes words that spell a sign
("and", "is") as that sign. :func:`trusted` takes off what a file format adds to a ground truth.
"""

from __future__ import annotations

import html.entities
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Final

from recipe.math.answers.units import bare_units, cardinal

_CURRENCIES: Final = {
    r"\$": "dollars", r"\yen": "yen", "¥": "yen", r"\pounds": "GBP", "£": "GBP", r"\euro": "euros", "€": "euros",
    "₹": "rupees",
}  # fmt: skip
#: Connecting words, by the sign that they spell.
_SPELLED: Final = {
    r"\land": "and", r"\lor": "or", "=": "is are be was were equals equal", r"\approx": "about approximately roughly",
    "+": "plus", "-": "minus negative", r"\cdot": "times", "^{2}": "squared", "^{3}": "cubed", r"\bmod": "mod modulo",
}  # fmt: skip
_SIGN_OF: Final = {word: sign for sign, words in _SPELLED.items() for word in words.split()}
_WORD: Final = r"(?:[^\W\d_]{3,}|a[nt]|by|i[fns]|be|o[fr]|so|to|a(?=\s+\w{3}))"
_CJK: Final = r"[\u4e00-\u9fff]+"
_BARE_WORDS: Final = rf"{_CJK}|(?<![^\s(\"'\x03]){_WORD}(?:[\s'/-]+{_WORD})*(?=[\s.,:;!?)\"'\x02-]|\Z)"
_SETS: Final = {"real": r"\mathbb{R}", "rational": r"\mathbb{Q}", "integer": r"\mathbb{Z}", "natural": r"\mathbb{N}"}
_SIGNS: Final = str.maketrans(
    {
        sign: f" \\{name} "
        for signs, name in zip(
            "× ·∙⋅ ≠ ≤⩽ ≥⩾ ≈ ≡ ∞ ± ∪ ∩ ∈ ∅ ∖ ∠ Ω ⟨ ⟩ ∨ ∧ √".split(),  # noqa: SIM905
            "times cdot ne le ge approx equiv infty pm cup cap in emptyset setminus angle Omega langle rangle lor land sqrt".split(),  # noqa: SIM905, E501
            strict=True,
        )
        for sign in signs
    }
    | dict.fromkeys("º˚", "°") | dict.fromkeys("÷∕⁄", "/") | dict.fromkeys("…⋯", "...") | dict.fromkeys("‘’′", "'")
    | {"−": "-", "。": ".", "、": ",", "或": r" \lor ", "和": r" \land ", "ℝ": r"\mathbb{R}"}
)  # fmt: skip
_Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str], str], ...]


def _equations(system: re.Match[str]) -> str:
    """A system of equations, one a row, as a list; anything else, such as a function by cases, as it is."""
    rows = [re.sub(r"&|[\s,;.]+\Z", "", row) for row in re.split(r"\\\\(?:\[\w.]+\])?", system[1]) if row.strip()]
    return ", ".join(rows) if all(re.fullmatch(r"[^=<>,;]+=[^=<>,;]+", row) for row in rows) else system[0]


FUNCTIONS: Final = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|cis"
#: Commands whose argument is all that they show. Of any other command the argument is no answer.
_DRESSING: Final = re.compile(
    r"boxed|f?box|framebox|math(?:bf|it|sf|tt|cal|scr|frak|op|bin|rel|ord|inner|strut)|bm|boldsymbol|pmb|emph|underline"
    r"|underbrace|overbrace|ensuremath|smash|num|red|blue|green"
)
_HIDDEN: Final = re.compile(r"tag|label|[hv]space|[hv]?phantom")
_TEXT: Final = re.compile(r"text(?!color|style)\w*|mathrm|[mh]box|operatorname")
_SWITCH: Final = re.compile(
    r"\w+style|(?:bf|it)\w*|rm|sf|tt|tiny|small|normalsize|large|huge|L\w+|Huge|limits|[bB]igg?[lrm]?|left|right"
    r"|checkmark|blacksquare|square|nonumber|strut"
)
#: Commands for one sign, by the command that stands for it here.
_SYNONYMS: Final = {
    r"\le ": "leq leqslant leqq", r"\ge ": "geq geqslant geqq", r"\ne ": "neq", "<": "lt", ">": "gt", "(": "langle",
    ")": "rangle", "|": "vert lvert rvert mid", r"\emptyset ": "varnothing", "...": "dots ldots cdots dotsc dotsb",
    r"\log_{10}": "lg", " ": "quad qquad enspace",
}  # fmt: skip
_COMMANDS: Final = {name: sign for sign, names in _SYNONYMS.items() for name in names.split()}
_ENVIRONMENT: Final = (
    r"\\(?:begin|end)\s*\{(?:equation|align|aligned|gather|gathered|split|math|displaymath|center)\*?\}"
)
#: Pattern, replacement, and an answer and a truth, between bars, that are equal by this rule only.
_SPELLINGS: Final[_Rules] = (
    (r"\\([a-zA-Z]+)", lambda m: _COMMANDS.get(m[1], m[0]), r"x\leqslant 5 || x\le 5"),
    (r"([<>!])=|\\not\s*=", lambda m: {"<": r"\le ", ">": r"\ge "}.get(m[1], r"\ne "), r"x<=5 || x\le 5"),
    (r"\\not\s*\\in(?![a-z])", r"\\notin ", r"x\not\in A || x\notin A"),
    (r"(?<!\\)\$|\\[()\[\]](?!\d+pt)|`|</?[a-zA-Z]\w*>|<\|\w+\|>", "", r"$\frac12$ || 0.5"),
    (r"\A(?:[\s*]|__)+|(?:[\s*]|__)+\.?\s*\Z|\*\*(?=\W)", "", "__12__ || 12"),
    (r"\*\*", "^", "x**2 || x^2"),
    (r"(?:\\left\s*\\\{\s*\\begin\{(?:array|aligned|matrix)\}(?:\{[lcr]*\})?|\\begin\{cases\})((?:(?!\\end)[\s\S])*)\\end\{\w+\}"
     r"(?:\s*\\right\s*\.)?", _equations, r"\begin{cases}x=5\\y=6\end{cases} || x=5,y=6"),
    (_ENVIRONMENT, " ", r"\begin{aligned}5\end{aligned} || 5"),
    (r"\\\\\s*\[\s*\d+(?:\.\d+)?\s*\w\w\]", r"\\\\",
     r"\begin{pmatrix}1\\[4pt]2\end{pmatrix} || \begin{pmatrix}1\\2\end{pmatrix}"),
    (r"(?<!\\)\\[,;: ]|~", " ", r"12\,000 || 12000"),
    (r"\\!\s*|\\n\Z|(?<![a-zA-Z}])\{\}", "", r"12,\!000 || 12000"),
    (r"\s*\{\s*([,:])\s*\}\s*", r"\1", "12{,}000 || 12000"),
    (r"&\s*=", "=", r"\begin{aligned}x&=5\end{aligned} || 5"),
    (rf"(?:\b(?:US|USD)\s*)?({'|'.join(map(re.escape, _CURRENCIES))})(?![a-zA-Z])\s*((?:\d|[.,]\d)*)",
     lambda m: f"{m[2]}\\text{{ {_CURRENCIES[m[1]]} }}" if m[2] else " ", "€12 || 12"),
    (r"(?:\\mu\s*|[μµ])(?=\\(?:text|mathrm)\s*\{)\\\w+\s*\{\s*", r"\\text{mu", r"5\ \mu\text{m} || 5"),
    (r"\\([%_])", r"\1", r"50\% || 0.5"),
    (r"\bper\s+cent\b", "percent", r"50\text{ per cent} || 0.5"),
    (r"\{\s*\\rm(?![a-z])([^{}]*)\}", r"\\text{\1}", r"5{\rm cm} || 5"),
    (r"\+\s*\\(?:text|mathrm)\s*\{?\s*(?:[Cc]|const(?:ant|\.)?)(?![a-zA-Z])\s*\}?", "+C",
     r"x+\text{C} || x+C"),
    (r"\\sqrt\s+(\d+)", r"\\sqrt{\1}", r"\sqrt 12 || 2\sqrt{3}"),
    (r"\^\s*\{?\s*(?:\\circ|\\degree|(?:\\(?:text|mathrm)\s*)?\{?\s*o(?!\w)\s*\}?)\s*\}?|\\degree", "°",
     r"\sin 30^\circ || 0.5"),
    (rf"(?<![\\a-zA-Z])(sqrt|pi|infty|{FUNCTIONS})(?![a-zA-Z])", r"\\\1 ", r"2pi || 2\pi"),
    (r"(?:\{|\A)([^{}]*)\\choose(?![a-z])([^{}]*)(?:\}|\Z)", r"\\binom{\1}{\2}", r"{5 \choose 2} || 10"),
)  # fmt: skip
#: Unit vectors, before their dress is taken off: 3\\mathbf{i} - 2\\hat{j}.
_VECTOR: Final = re.compile(
    r"\\(?:math(?:bf|rm)|boldsymbol|bm|pmb|textbf|(?:wide)?hat|vec|overrightarrow)\s*\{?\s*(?:\\(?:mathbf|bm|hat)\s*\{?\s*)?"
    r"(?:\\([ij])math|\b([ijk])\b)\s*\}*"
)
_ANGLE: Final = r"(-?\d{1,4}(?:\.\d{1,4})?)\s*°"
_NUMBERS: Final[_Rules] = (
    (rf"(\\(?:sin|cos|tan|cot|sec|csc|cis)(?:\^\{{-?\d+\}})?)\s*(?:\({_ANGLE}\s*\)|\{{{_ANGLE}\s*\}}|{_ANGLE})",
     lambda m: f"{m[1]}({_latex(Fraction(m[2] or m[3] or m[4]) / 180)}\\pi)", r"\sin 30^\circ || 0.5"),
    (r"\\cis\s*(\((?:[^()]|\([^()]*\))*\)|\{[^{}]*\}|\w+)", r"(\\cos\1+i\\sin\1)", r"\operatorname{cis}(\pi) || -1"),
    (r"°\s*([CF])(?![\w(^])", " \x02degrees \\1\x03 ", r"25^\circ C || 25"),
    (r"°", " \x02degrees\x03 ", r"45^\circ || 45"),
    (r"%", " \x02percent\x03 ", r"50\% || 0.5"),
    (r"(?<![\w.,(\[{])([1-9]\d{0,2}(?:([, '])\d{3})(?:\2\d{3})*)(?![\d])", lambda m: re.sub(r"[, ']", "", m[1]),
     "12,000 || 12000"),
    (r"(?<![\w.,(\[{])[1-9]\d{0,2}(?:\.\d{3}){2,}(?![\d.])", lambda m: m[0].replace(".", ""), "1.234.567 || 1234567"),
    (r"(?<=\d) ?[eE]([+-]?)0*(\d+)(?!\d|\.\d)", lambda m: f" \\cdot 10^{{{m[1].strip('+')}{m[2]}}}", "2.5e3 || 2500"),
    (r"(?<![a-zA-Z\\])(?:C|\x02C\x03)\s*_(\{[\w+-]+\})\^(\{\w+\})|_(\{\d+\})C_(\{\d+\})",
     lambda m: "\\binom" + "".join(filter(None, m.groups())), "C_5^2 || 10"),
    (r"(?<![\w.}])(\d{1,9})\s+(\d{1,9})/([1-9]\d{0,8})(?![\d/])", r"\1\\frac{\2}{\3}", "1 1/2 || 1.5"),
    (r"(?<![\w.])(\d*)\.(\d*?)(\d{1,6}?)\3{2,}(?:\.\.\.)", r"\1.\2\\overline{\3}", r"0.333\ldots || \frac13"),
    (r"(?<![\d.])(\d{0,9})\.(\d{0,6})\\(?:overline|bar|dot)\s*\{?(\d{1,6})\}?(?:\.\.\.)?(?!\d)",
     lambda m: _latex(_repeating(*m.groups())), r"0.\overline{3} || \frac13"),
    (r"(\A|\\in)\s*\]([^\[\]()]*[,;][^\[\]()]*)(?=[\[\]]\s*\Z)", r"\1(\2", "]1,2] || (1,2]"),
    (r"([(\[][^\[\]()]*[,;][^\[\]()]*)\[\s*\Z", r"\1)", "[1,2[ || [1,2)"),
    (r"(\\mathbb\{?[RQZNC]\}?)\s*(?:-|\\backslash(?![a-z]))\s*(?=\\\{)", r"\1 \\setminus ",
     r"\mathbb{R}-\{0\} || x\ne 0"),
    (r"(?<=\.)(\d+)\.\.\.", r"\1", r"0.25\ldots || 0.25"),
    (r"(?<=[\d)])\s*(?=\\binom)", r" \\cdot ", r"2\binom{5}{2} || 20"),
    ("(?<=[\\d.}])\\s*(?:\x02([kMG])\x03\\s*)?\\\\Omega(?![a-z])", "\x02\\1ohm\x03", r"5\ \Omega || 5"),
    (rf"(?<=[\d.}}])\s*({bare_units()})", "\x02\\1\x03", "5cm || 5"),
)  # fmt: skip


def _latex(value: Fraction) -> str:
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _repeating(whole: str, fixed: str, cycle: str) -> Fraction:
    nines = 10 ** len(fixed) * (10 ** len(cycle) - 1)
    return Fraction(int(whole + fixed + cycle) - int(whole + fixed or 0), nines)


def cleaned(text: str) -> str:
    """One spelling of an answer."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+|[₀-₉]+|[^\x00-\x7f]", _plain_sign, text.translate(_SIGNS))
    for pattern, by, _ in _SPELLINGS:
        text = re.sub(pattern, by, text)
    text = _coordinates(text)
    text = _undressed(re.findall(r"\\[a-zA-Z]+\*?|\\.|.", text, re.DOTALL)[::-1])
    text = re.sub(r"(?<=(?<!\\)\{)\s+|\s+(?=\}|[\^_])", "", text)
    for pattern, by, _ in _NUMBERS:
        text = re.sub(pattern, by, text)
    text = re.sub(rf"\x02[^\x03]*\x03|\\[a-zA-Z]+|({_BARE_WORDS})", _mark, text, flags=re.IGNORECASE)
    text = re.sub("\\\\frac\\{\x02([^\x03]*)\x03\\}\\{\x02([^\x03]*)\x03\\}", "\x02\\1/\\2\x03", text)
    text = re.sub("\x03\\s*(\\^\\{-?\\d\\})", "\\1\x03", text)
    text = stripped(re.sub(r"\x03((?:\s|[./-]|\\cdot)*)\x02", lambda m: "/" if "/" in m[1] else " ", text))
    if match := _WHOLE_SET.fullmatch(text):
        without = rf" \setminus \{{{match['without']}\}}" if match["without"] else ""
        return _SETS[match["set"].lower()] + without
    return text


def _coordinates(text: str) -> str:
    """A sum of multiples of unit vectors as the tuple of its coordinates; any other text as it is."""
    axes = [marked or plain for marked, plain in _VECTOR.findall(text)]
    if len(axes) < 2 or len(set(axes)) < len(axes):
        return text
    before, name, total = text.rpartition("=")
    marked = _VECTOR.sub(lambda match: f"\x00{match[1] or match[2]}", total)
    terms = re.findall(
        r"\s*([+-]?)\s*((?:[^\x00+{(-]|\{[^\x00]*\}|\([^\x00()]*\)|(?<=\{)-)*?)\s*\x00([ijk])\s*", marked
    )
    if "".join(f"{sign}{factor}\x00{axis}" for sign, factor, axis in terms).replace(" ", "") != marked.replace(" ", ""):
        return text
    at = {axis: f"{sign.strip('+')}{factor or 1}" for sign, factor, axis in terms}
    return f"{before}{name}({', '.join(at.get(axis, '0') for axis in ('ijk' if 'k' in at else 'ij'))})"


_DOUBLED: Final = re.compile(
    r"(?<!\\)\\\\(?:[dt]?frac|sqrt|text|mathrm|begin|left|pi|cdot|times|infty|le|ge|ne|neq|leq|geq|circ|sin|cos|tan|log"
    r"|ln|boxed|binom|pm|cup|cap|in|theta|alpha|overline|angle)(?![a-zA-Z])"
)


def unescaped(text: str) -> str:
    """A text without the doubled backslashes of a file format."""
    return text.replace("\\\\", "\\") if _DOUBLED.search(text) else text


def trusted(truth: str) -> str:
    """A ground truth as its author meant it: without escapes and quotes of a file format, and glued words apart."""
    truth = re.sub(r"\\(q?quad)(?=[a-zA-Z])", r"\\\1 ", unescaped(truth))
    quoted = r"\"[^\"]*\"|'[^']*'"
    if re.fullmatch(rf"\s*(?:{quoted}|\[\s*(?:{quoted})(?:\s*,\s*(?:{quoted}))*\s*\])\s*", truth):
        truth = ", ".join(part[1:-1] for part in re.findall(quoted, truth))
    truth = re.sub(r"(?<=\})[^\w{}\\.]*(?:[a-z]+[^\w{}\\.]+){0,3}(?=\\boxed)", ", ", truth)
    if truth.count("{") > truth.count("}"):  # a box that is not closed
        truth = re.sub(r"\A\s*\\boxed\s*\{", "", truth)
    return unglued(truth)


def unglued(text: str) -> str:
    """A text whose "or" and "and" stand apart from numbers and names: "x=3ory=4"."""
    return re.sub(r"(?<=[\d)\]}])(or|and)(?=\s*(?:[-\d(\[{\\]|[a-zA-Z](?:\([a-zA-Z]\))?\s*=))", r" \\text{ \1 } ", text)


def _plain_sign(match: re.Match[str]) -> str:
    """ASCII or LaTeX, by NFKC; superscripts, subscripts and vulgar fractions keep what they mean."""
    sign, plain = match[0], unicodedata.normalize("NFKC", match[0])
    if script := re.match("<su(b|per)>", unicodedata.decomposition(sign[0])):
        return f"{'_' if script[1] == 'b' else '^'}{{{plain.replace('−', '-')}}}"
    if "⁄" in plain:
        return " \\frac{{{}}}{{{}}}".format(*plain.split("⁄"))
    if (digit := unicodedata.decimal(sign, None)) is not None:
        return str(digit)
    if "GREEK" in unicodedata.name(sign, "") and ord(sign) in html.entities.codepoint2name:
        return f"\\{html.entities.codepoint2name[ord(sign)]} "
    return {"Cf": "", "Sc": sign if sign in _CURRENCIES else " ", "Pd": "-"}.get(unicodedata.category(sign), plain)


def _undressed(tokens: list[str], script: bool = False) -> str:
    """The text of tokens, the last one first. Arguments are in braces, and commands that only dress theirs are gone."""
    text = ""
    while tokens:
        text += _unit(tokens, script)
    return text


def _unit(tokens: list[str], script: bool) -> str:
    """The next token with its arguments; ``script`` inside of a superscript or subscript."""
    token = tokens.pop()
    name = token.strip("\\*")
    if token in "^_":
        number = ""
        while tokens and re.fullmatch(r"-?\d*", number + tokens[-1]):
            number += tokens.pop()
        return f"{token}{{{number or _argument(tokens, script=True)}}}"
    if not (token[0] == "\\" and name[:1].isalpha()):
        return token
    if match := re.fullmatch(r"[a-z]*(frac|binom)", name):
        return f"\\{match[1]}{{{_argument(tokens)}}}{{{_argument(tokens)}}}"
    if name == "sqrt":
        root = f"[{_argument(tokens, '[]')}]" if _next(tokens) == "[" else ""
        return f"\\sqrt{root}{{{_argument(tokens, '()' if _next(tokens) == '(' else '{}')}}}"
    if name in ("SI", "qty"):
        return f"{_argument(tokens)} \x02{re.sub('[^a-zA-Z]', '', _argument(tokens))}\x03"
    if _SWITCH.fullmatch(name):
        return " "
    if _TEXT.fullmatch(name):
        content = _argument(tokens, script=script)
        is_name = name != "operatorname" or re.search(r"[a-zA-Z\x02\\]|\A\W*\Z", content)
        return _text(content, script) if is_name else f"{token}{{{content}}}"
    if _next(tokens) != "{":
        return f"{token} "
    dressed = _argument(tokens)
    if "color" in name:
        return _argument(tokens)
    if _HIDDEN.fullmatch(name):
        return ""
    if _next(tokens) == "{" or not _DRESSING.fullmatch(name):  # \overset{6}{5} is not only dressed
        return f"{token}{{{dressed}}}"
    return dressed


def _next(tokens: list[str]) -> str:
    """The next token that is no space, or nothing."""
    while tokens and tokens[-1].isspace():
        tokens.pop()
    return tokens[-1] if tokens else ""


def _argument(tokens: list[str], brackets: str = "{}", script: bool = False) -> str:
    """The next argument: a group in brackets, else one token with its own arguments."""
    if _next(tokens) != brackets[0]:
        return _unit(tokens, script) if _next(tokens) not in ("", "}") else ""
    depth, group = 0, []
    while tokens:
        group.append(tokens.pop())
        depth += (group[-1] == brackets[0]) - (group[-1] == brackets[1])
        if not depth:
            return _undressed(group[-2:0:-1], script)
    return "\\unclosed "


def _text(content: str, script: bool) -> str:
    """The content of a text command: marked words, and whatever else stands there as it is."""
    if script or re.fullmatch(r"\s*[eid]\s*|[\s,.]*", content):
        return content
    if re.fullmatch(rf"\s*(?:{FUNCTIONS}|lcm)\s*", content):
        return f"\\{content.strip()} "
    phrase = r"(?<![\\a-zA-Z\x02])[^\W\d_]+\.?(?:[\s'/-]+[^\W\d_]+\.?)*"
    return " " + re.sub(rf"\x02[^\x03]*\x03|({phrase})", _mark, content) + " "


def _mark(match: re.Match[str]) -> str:
    """Words between marks; those that spell a sign as the sign. Whatever is no group is left as it is."""
    if match[1] and cardinal(match[1]) is not None:
        return f"\x02{match[1]}\x03"
    parts = re.split(rf"\b({'|'.join(_SIGN_OF)})\b", match[1] or "", flags=re.IGNORECASE)
    marked = [f"\x02{part.strip()}\x03" if part.strip() else "" for part in parts]
    marked[1::2] = [f" {_SIGN_OF[part.lower()]} " for part in parts[1::2]]
    return "".join(marked) if match[1] else match[0]


def stripped(text: str) -> str:
    """Without punctuation, spaces and braces around it."""
    before = None
    while text != before:
        before = text
        text = re.sub(r"\A(?:[\s,;:=~*]|\\approx|\\\\)+|(?:[\s,;:~*]|(?<!\.)\.|\\\\|\\\Z)+\Z", "", text)
        if text[:1] == "{" and closes(text, 0) == len(text) - 1:
            text = text[1:-1]
    return text


def closes(text: str, opening: int) -> int | None:
    r"""Where the bracket at ``opening`` is closed; brackets of intervals may differ."""
    depth = 0
    for match in re.compile(r"[{(\[]|[})\]]").finditer(text, opening):
        depth += 1 if match[0] in "{([" else -1
        if depth == 0:
            return match.start()
    return None


_WHOLE_SET: Final = re.compile(
    f"(?:[a-zA-Z]\\s*(?:=|\\\\in)\\s*)?\x02(?:(?:all|any|every|the|set|of)\\s+)+(?P<set>{'|'.join(_SETS)})s?(?:\\s+numbers?)?"
    "(?:\x03|\\s+(?:except|other\\s+than)\\s*(?:for)?\x03\\s*(?:[a-zA-Z]\\s*=)?(?P<without>[^\x02]+))",
    re.IGNORECASE,
)
