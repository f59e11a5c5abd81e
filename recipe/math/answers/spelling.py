r"""One spelling of an answer and of a truth, words and units apart: what math-verify reads whole or not at all."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_RAISED: Final = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
#: Signs that models write in place of LaTeX, each with its command.
_SIGNS: Final = {
    "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{MULTIPLICATION SIGN}": r"\times ", "·": r"\cdot ", "÷": "/",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ", "\N{UNION}": r"\cup ",
    "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ", "θ": r"\theta ",
}  # fmt: skip
# fmt: off
#: A pattern, what is written in its place, an example and what it becomes; applied in this order.
SPELLINGS: Final = (
    (r"(?<=\d)(?:,|\{,\}|\s)*(?:\\!|\{,\})\s*(?=\d)", ",", r"32{,}348,\!000", "32,348,000"),
    (r"\\(?:displaystyle|textstyle|limits|left|right|[bB]igg?[lr]?|bf|rm)(?![a-zA-Z])"
     r"|\\!|(?<!\\)\\[()\[\]]|\\?\$|[€£¥₹]", "", r"$\left(\$3, 4\right)$", "(3, 4)"),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])", " ", r"5\,\quad", "5  "),
    (r"\A((?:(?!\\[lg]e|[<>]).)*?),?\s*\(?\s*[a-z]\s*\\in\s*\\mathbb\s*\{?Z\}?\s*\)?", r"\1",
     r"2n, n \in \mathbb{Z}", "2n"),
    (r"\A\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:[|:]|\\mid)(.*)\\\}\Z", r"\1", r"\{x \mid x>2\}", " x>2"),
    (r"\\[dtc](frac|binom)", r"\\\1", r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\\(frac|binom)\s*([\da-z]|\\pi)", r"\\\1{\2}", r"\frac\pi6", r"\frac{\pi}6"),
    (r"(\\(?:frac|binom)\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*([\da-z]|\\pi)", r"\1{\2}", r"\frac{\pi}6", r"\frac{\pi}{6}"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}", r"\sqrt2", r"\sqrt{2}"),
    (r"\\log_\{?(\d+)\}?\s*(\d+)", r"\\log_{\1}{\2}", r"\log_2 3", r"\log_{2}{3}"),
    (r"\\(?:text(?:bf|it|rm|sf|tt)?|mbox|mathrm|operatorname)\s*\{", r"\\text{", r"\mathrm{cm}", r"\text{cm}"),
    (r"\\(?:mathbf|boldsymbol|boxed)\s*\{([^{}]*)\}", r"{\1}", r"\mathbf{42}", "{42}"),
    (r"\\text\{\s*(-?\d[\d.,]*)\s+([^{}]*)\}", r"\1 \\text{\2}", r"\text{12 kg}", r"12 \text{kg}"),
    (r"\\text\{\s*([ie]|\d[\d.,]*|\\?(?:ln|log|sin|cos|tan))\s*\}", r" \1 ", r"2\text{i}", "2 i "),
    (r"\\(le|ge|ne)q?(?:slant)?(?![a-z])", r"\\\1 ", r"x \leqslant 2", r"x \le  2"),
    (r"\\langle(?![a-z])(.*?)\\rangle(?![a-z])", r"(\1)", r"\langle 1, 2 \rangle", "( 1, 2 )"),
    (r"\\varnothing(?![a-z])|∅", r"\\emptyset ", r"\varnothing", r"\emptyset "),
    (r"\A[a-zA-Z]?\s*\\approx(?![a-z])|(?<=[\w})])\s*\(?\s*\\approx(?![a-z]).*\Z", "", r"50/3 \approx 16.67", "50/3"),
    (r"(\\circ\}?)\s*[CF](?![a-zA-Z])", r"\1", r"-4^{\circ}C", r"-4^{\circ}"),
    (r"\\text\{\s*percent\s*\}|\bper\s?cent\b|\\%", "%", r"50\%", "50%"),
    (r"(?<![\w.])(\d+)\s+(\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", "1 3/4", r"1\frac{3}{4}"),
    (r"(?<=\d)\s*[eE]\s*\+?(-?)0*(\d+)(?!\.?\d)", r" \\cdot 10^{\1\2}", "6.02e+23", r"6.02 \cdot 10^{23}"),
    (r",?\s*(?:\\text\{[\s,]*or[\s,]*\}|(?<=[\s\d}$)])or(?=[\s\d\\($-]))", " ; ", r"1 \text{ or } 2", "1 ;  2"),
    (r",?\s*(?:\\text\{[\s,]*and[\s,]*\}|(?<=[\s\d}$)])and(?=[\s\d\\($-]))", " , ", "1, 2, and 3", "1, 2 ,  3"),
    (r"([_^])\s*([\da-zA-Z])", r"\1{\2}", "52_8", "52_{8}"),
)
# fmt: on
#: Digits in groups of three, in no list or tuple.
_THOUSANDS: Final = re.compile(r"(?<![\d.,(\[{_])(\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)(?![\d,])")


def spelled(text: str) -> str:
    """A text in one spelling, by `SPELLINGS`, without separators of thousands and what surrounds an answer."""
    text = _RAISED.sub(lambda match: f"^{{{match[0]}}}", text)
    text = "".join(_SIGNS.get(sign, sign) for sign in unicodedata.normalize("NFKC", text)).strip()
    for pattern, by, *_ in SPELLINGS:
        text = re.sub(pattern, by, text)
    text = re.sub(r"\s+", " ", text)
    return stripped(_THOUSANDS.sub(lambda match: re.sub(r"[,\s]", "", match[0]), text))


def stripped(text: str) -> str:
    """Without punctuation and spaces around it, and without brackets around one whole."""
    before = None
    while text != before:
        before = text
        text = re.sub(r"\A(?:[\s,;:=*`]|__)+|(?:\\\\|[\s,;:*`_]|(?<!\.)\.)+\Z", "", text)
        is_whole = text[:1] in ("{", "(") and closing(text, 0) == len(text) - 1
        if is_whole and (text[0] == "{" or len(split(text[1:-1])) == 1):
            text = text[1:-1]
    return text


def closing(text: str, opening: int, brackets: str = r"[{}()\[\]]") -> int:
    """Where the bracket at `opening` is closed; -1 if nowhere."""
    depth = 0
    for match in re.finditer(brackets, text[opening:]):
        depth += 1 if match[0][-1] in "{([" else -1
        if depth == 0:
            return opening + match.end() - 1
    return -1


def split(text: str, separator: str = "[,;]") -> list[str]:
    """The parts of a text between separators outside of all brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"([{{(\[]|\\begin)|([}})\]]|\\end)|{separator}", text):
        if match[1] or match[2]:
            depth += 1 if match[1] else -1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


#: A text in LaTeX, three letters that are no function, or two of which the first is a capital.
_WORDS: Final = re.compile(
    r"\\text\{|(?<![\\a-zA-Z])(?!(?:sin|cos|tan|cot|log|sqrt|gcd|lcm|min|max)\b)(?:[a-zA-Z]{3,}|[A-Z][a-zA-Z])(?![a-zA-Z])"
)
#: A number, and words, a known unit or a power of one behind it: 2xy and \pi abc are products.
_UNIT: Final = re.compile(
    r"(.*?[\d})\w%])\s*((?:\\text\{(?:[^{}]|\{\d\})*\}|(?<=\d )[mgLhs]|(?<=[\d\s}])(?:(?:[ckm]m|kg|m[lL]|ft|in|yd|oz|sq"
    r"|[AP]M)(?![a-zA-Z])|(?<=[^a-z]\s)[a-zA-Z]{3,}|[a-zA-Z]{4,})[a-zA-Z\s/]*)(?:\s*\^\s*\{?\d}?)?)",
    re.S,
)
#: Words that change the number before them, or take it back.
_CHANGING: Final = re.compile(
    r"\d|\b(?:not|no|or|and|more|less|than|least|most|over|under|above|below|up|down|maybe|tens?|dozen|score|to|i?sh|th"
    r"|hundreds?|thousands?|(?:m|b|tr)il?(?:lion)?s?|bn|mn|lakh|crore|(?!months)\w*ths|thirds?|hal\w+|quarters?|squared|cubed|root"
    r"|if|when|is|so|too|plus|minus|wrong|\w*(?:led|ved)|factorial|times|negative)\b",
    re.IGNORECASE,
)


def has_words(text: str) -> bool:
    """Whether a text has words that are no functions; a product of three letters is taken for one."""
    return bool(_WORDS.search(re.sub(r"\\(?:begin|end)\{\w+\}", "", text)))


def without_unit(text: str) -> tuple[str, str]:
    """A number or expression without the words behind it, and these words, folded. Words that change it stay."""
    match = _UNIT.fullmatch(text)
    if match is None or has_words(match[1]) or not re.search(r"\d|\\", match[1]):
        return text, ""
    is_changed = _CHANGING.search(match[2].partition("^")[0])
    return (text, "") if is_changed else (stripped(match[1]), folded(match[2]))


def folded(text: str) -> str:
    """Words and operators without case, marks, articles and plural s."""
    text = re.sub(r"\\text(?![a-z])", " ", text).lower()
    text = re.sub(r"\b(?:the|an?|per)\s+(?=[a-z]{2})(?!(?:and|or)\b)", " ", text)  # not of "Plan A", "A and C"
    return " ".join(re.sub(r"(?<=..)s\Z", "", word) for word in re.findall(r"[^\W_]+|[-+*/^<>=%!]", text))
