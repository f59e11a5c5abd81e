"""One verdict on a response, with the reason: by the kinds of answer and truth, or by math-verify alone."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple

from recipe.math.answers.comparing import (
    computed,
    has_solutions,
    is_assignment,
    parsed,
    readable,
    same,
    says,
    variables,
)
from recipe.math.answers.extraction import answer_texts, bare, formula, said
from recipe.math.answers.limits import MAX_EXPRESSION_CHARS, Refused
from recipe.math.answers.reading import DOMAIN, ELEMENT, INTEGER, SEPARATOR, WORDS, Answer, choice, naming, read, split
from recipe.math.answers.sets import real_set
from recipe.math.answers.spelling import cleaned, trusted, unglued
from recipe.math.answers.verdict import Status


def judge(response: str, truth: str, normalise: bool) -> Status:
    """The verdict on a response: by the kinds of answer and truth, or math-verify's own if not ``normalise``.

    Exceptions become statuses: running out of memory or recursion is a failed comparison, a limit of `limits` REFUSED.
    """
    try:
        return by_kind(response, truth) if normalise else _plain(response, truth)
    except Refused:
        return Status.REFUSED
    except Exception:
        return Status.COMPARE_FAILED


# ---------------------------------------------------------------- math-verify's own verdict


def _plain(response: str, truth: str) -> Status:
    """As math-verify with the targets of verl 0.9.1's `math_verify` scorer; a match of any pair of readings counts."""
    try:
        gold = _parse_truth(truth)
    except (Exception, Refused):
        gold = ()
    return _judge_text(response, gold) if gold else Status.BAD_TRUTH


def _parse_response(text: str) -> list[Any]:
    from math_verify import parse
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    targets = (ExprExtractionConfig(), LatexExtractionConfig())
    return list(parse(text, targets, parsing_timeout=None, raise_on_error=True))


def _judge_text(text: str, gold: tuple[Any, ...]) -> Status:
    from math_verify import verify

    try:
        predictions = _parse_response(text)
    except Refused:
        return Status.REFUSED
    except Exception:
        return Status.PARSE_FAILED
    if not predictions:
        return Status.NO_ANSWER
    failed = False
    for target, prediction in product(gold, predictions):
        try:
            if verify(target, prediction, timeout_seconds=None, raise_on_error=True):
                return Status.CORRECT
        except Refused:
            return Status.REFUSED
        except Exception:
            failed = True
    if failed:
        return Status.COMPARE_FAILED
    return Status.PARSE_FAILED if all(isinstance(p, str) for p in predictions) else Status.WRONG


@functools.lru_cache(maxsize=4096)
def _parse_truth(truth: str) -> tuple[Any, ...]:
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig

    return tuple(parse(f"\\boxed{{{truth}}}", (LatexExtractionConfig(),), parsing_timeout=None, raise_on_error=True))


# ---------------------------------------------------------------- by kind


def by_kind(text: str, truth: str) -> Status:
    """Whether the answer of a text is the truth: by REFUSALS and ACCEPTANCES, whose order does not matter."""
    extract = answer_texts(text)
    sentence = said(text) if extract.in_sentence else ""
    texts = [unglued(part) for part in extract.texts or bare(text)] or _last_numbers(sentence) or formula(sentence)
    if not texts:
        return Status.NO_ANSWER
    gold = trusted(truth)
    gold = next(iter(answer_texts(gold).texts), gold)
    if max(map(len, (gold, texts[0]))) > MAX_EXPRESSION_CHARS:
        return Status.CORRECT if texts[0].strip() == trusted(truth).strip() else Status.REFUSED
    answers = [computed(cleaned(part)) for part in texts if len(part) <= MAX_EXPRESSION_CHARS]
    target, *answers = _bound([computed(cleaned(gold)), *answers])
    sides = _Sides(text, truth, texts, target, answers, sentence)
    if any(rule.applies(sides) for rule in REFUSALS):
        return Status.WRONG
    if any(rule.applies(sides) for rule in ACCEPTANCES):
        return Status.CORRECT
    if not readable(sides.target):
        return Status.BAD_TRUTH
    return Status.WRONG if sides.readable else Status.PARSE_FAILED


def _bound(texts: list[str]) -> list[str]:
    """With one name for the letter that ranges over a set, first the truth: "2k, k in Z" and "2n, n in Z"."""
    domains = [DOMAIN.search(text) for text in texts]
    letters = [(domain or domains[0] or {"names": ""})["names"].strip() for domain in domains]
    if not domains[0] or not all(re.fullmatch("[a-zA-Z]", letter) for letter in letters):
        return texts
    pairs = list(zip(letters, texts, strict=True))
    are_families = (all(domains) or r"\pi" in texts[0]) and all(_is_family(text, letter) for letter, text in pairs)
    name = INTEGER if are_families else ELEMENT
    return [re.sub(_ALONE.format(letter), rf"\{name} ", text) for letter, text in pairs]


_ALONE = r"(?<![\\a-zA-Z]){}(?![a-zA-Z])"


def _is_family(text: str, letter: str) -> bool:
    """Whether each value of an answer is one family of numbers over all integers, in which k may be k - 1.

    A pair such as (k, -k) is none, as both have the same k; nor is f(k) = 2 k, nor are the values of several names.
    """
    domain = DOMAIN.search(text)
    if domain and not re.fullmatch(r"\\mathbb\s*\{?Z\}?[\s.]*", domain["set"]):
        return False
    values = [part.rpartition("=") for part, _ in split(DOMAIN.sub("", text), SEPARATOR)]
    return (
        len({name.strip() for name, *_ in values}) == 1
        and not re.search(_ALONE.format(letter), values[0][0])
        and not any(re.search(r"[(\[][^()\[\]]*[,;]", value) for *_, value in values)
    )


@dataclass(frozen=True)
class _Sides:
    """A response and its truth, as far as they are read."""

    text: str
    truth: str
    texts: list[str]  # the answer of the response; then that with all of its boxes
    target_text: str  # cleaned
    answers: list[str]  # the texts, cleaned
    sentence: str  # the last one with a number, if the answer is neither in a box nor in tags

    @functools.cached_property
    def both(self) -> tuple[str, str]:
        return self.target_text, self.answers[0]

    @functools.cached_property
    def target(self) -> Answer:
        return read(self.target_text)

    @functools.cached_property
    def choices(self) -> tuple[str, str]:
        """The letters of truth and answer; two empty ones, unless both are choices."""
        letters = choice(self.target_text)
        is_letter = letters and re.fullmatch(r"\W*\w\W*", self.answers[0])
        chosen = choice(self.answers[0].upper() if is_letter else self.answers[0])
        return (letters, chosen) if letters and chosen else ("", "")

    @functools.cached_property
    def readable(self) -> list[Answer]:
        """The readings of the answer. All boxes are the answer only where the truth is a list."""
        readings = [read(answer) for answer in self.answers]
        if choice(self.answers[0]):
            readings.append(read(re.sub("\\A\\(?\x02?\\(?[A-Z][).:\x03]+", "", self.answers[0])))
        has_value = re.search(r"[\d$\\]", self.texts[0]) or readings[0].text.isdigit()
        if self.sentence and self.target.kind != WORDS and not (has_value and says(readings[0])):
            readings = [read(cleaned(number)) for number in _last_numbers(self.sentence)]
        return [naming(answer) for answer in readings if readable(answer)]

    @functools.cached_property
    def are_sets(self) -> bool:
        return bool(self.readable) and readable(self.target) and has_solutions(self.target, self.readable[0])


def _is_another_choice(sides: _Sides) -> bool:
    return sides.choices[0] != sides.choices[1]


def _has_another_domain(sides: _Sides) -> bool:
    return _differ([re.sub(r"[\s{}.)]", "", match["set"]) for side in sides.both if (match := DOMAIN.search(side))])


def _is_another_half_of_a_day(sides: _Sides) -> bool:
    return _differ([match[1].lower() for side in sides.both if (match := _HALF_OF_A_DAY.search(side))])


def _differ(values: list[str]) -> bool:
    return len(set(values)) > 1


def _has_a_decimal_comma(sides: _Sides) -> bool:
    texts = (trusted(sides.truth), sides.texts[0])
    pair = [re.sub(r"\{,\}(?!\d{3}\Z)", ",", text.strip("$ ")) for text in texts]  # 2{,}500 is 2500
    return any(
        re.fullmatch(r"-?\d+\.\d+", one)
        and one.replace(".", ",") == re.sub(r"(?<=\d)[. ](?=\d{3}(?:[. ]\d{3})*,)", "", other)  # 1.234,5
        for one, other in itertools.permutations(pair)
    )


def _is_spelled_alike(sides: _Sides) -> bool:
    texts = {re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\s+", " ", side)) for side in sides.both}
    return len(texts) == 1 and texts != {""}


def _says_yes_or_no(sides: _Sides) -> bool:
    """Whether the answer begins with the yes or no that is the truth: "Yes, it is possible". "No. of sets" is no no."""
    word = re.fullmatch(r"\W*(yes|no)\W*", sides.target_text, re.IGNORECASE)
    if word is None:
        return False
    other = "no" if word[1].lower() == "yes" else "yes"
    reason = rf"[,.;:](?!\s*of\b)(?!.*\b(?:but|{other})\b)(?:[^\d=<>^\\]|\\text)+"
    return re.fullmatch(rf"(?is)\s*(?:\\text\s*\{{)?\s*{word[1]}\}}?{reason}", sides.texts[0]) is not None


def _is_the_same_choice(sides: _Sides) -> bool:
    return sides.choices[0] == sides.choices[1] != ""


def _reads_the_same(sides: _Sides) -> bool:
    joined = [set(re.findall(r"\\l(?:and|or)(?![a-z])", side)) for side in sides.both]
    if sides.are_sets and all(joined) and joined[0] != joined[1]:
        return False  # x<1 and x>2 is not x<1 or x>2
    targets = (sides.target, *_right_side(sides.target))
    return any(same(target, answer) for target in targets for answer in sides.readable)


def _is_the_same_set(sides: _Sides) -> bool:
    if not sides.are_sets:
        return False
    gold, value = (real_set(side, parsed) for side in sides.both)
    parts = [part for side in sides.both for part, _ in split(side, SEPARATOR)]
    one_name = len({names for part in parts if (names := variables(part))}) < 2
    return gold is not None and gold == value and one_name


class Rule(NamedTuple):
    """One way to decide, with a response and a truth that no other rule decides so."""

    applies: Callable[[_Sides], bool]
    response: str
    truth: str


#: If one of them applies, an answer is wrong.
REFUSALS: Final = (
    Rule(_is_another_choice, r"\boxed{A. B}", "B"),
    Rule(_has_another_domain, r"\boxed{x=k, k\in\mathbb{Z}}", r"x=k, k\in\mathbb{N}"),
    Rule(_is_another_half_of_a_day, r"\boxed{5\text{ p.m.}}", r"5\text{ a.m.}"),
)
#: Else an answer is correct, if one of them applies.
ACCEPTANCES: Final = (
    Rule(_has_a_decimal_comma, r"\boxed{3,5}", "3.5"),
    Rule(_is_spelled_alike, r"\boxed{5 \text{ of } 6}", r"5\text{ of }6"),
    Rule(_says_yes_or_no, r"\boxed{\text{Yes, it is possible}}", "Yes"),
    Rule(_is_the_same_choice, r"\boxed{(C)\ 5}", "C"),
    Rule(_reads_the_same, r"\boxed{\frac{2}{4}}", "0.5"),
    Rule(_is_the_same_set, r"\boxed{x>2}", r"(2,\infty)"),
)

_HALF_OF_A_DAY = re.compile(r"\b([ap])(?:\\?\.)?\s?m\b", re.IGNORECASE)
#: A sum of letters, or lengths, areas and their ratios: "m + n", "|AB| + |CD|", "NO / BO".
_LETTER = r"(?:\d*[a-wA-W]|[a-zA-Z]|\d*\\(?:alpha|beta|gamma))"
_ASKS = (
    rf"\s*(?:{_LETTER}(?:\s*\+\s*{_LETTER})+"
    r"|(?:[A-Z|+:/{}()\s-]|\\(?:[dt]?frac|cdot|times))+"
    r"|\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\\angle\s*)?(?:\\[a-z]+|[A-Z]+))\s*"
)


def _right_side(target: Answer) -> list[Answer]:
    """What a truth such as "NO / BO = 2" asks for: its right side, where the left one only names something."""
    left, _, right = target.text.partition("= ")
    if target.form != "=" or is_assignment(target) or not re.fullmatch(_ASKS, re.sub(r"_\{[^{}]*\}", "", left)):
        return []
    side = read(right)
    values = [parsed(part.text) for part in side.parts or (side,)]
    is_closed = all(value is not None and not value.free_symbols for value in values)
    return [side] if is_closed or not re.search(r"(?<![\\a-zA-Z])[a-z]", left) else []  # x + y = z does not ask for z


def _last_numbers(text: str) -> list[str]:
    """What math-verify finds in a text that names no answer, with the percent sign that it leaves out."""
    readings = [reading for reading in _parse_response(text.replace(r"\$", " ")) if isinstance(reading, str)]
    # Not "\\\\le" as "\\le", and not "x>0 or x<7" as "x>0, x<7".
    readings = [reading for reading in readings if not re.search(r"[\\<>]", reading) or reading in text]
    readings = [reading for reading in readings if reading.count("{") == reading.count("}")]  # not a part of a formula
    sides = [(reading, text.rpartition(reading)) for reading in readings]
    related = re.compile(r"(?:[<>≤≥≠]|[<>!]=|\\(?:le|ge|ne)q?)[\s$\\({]*\x00|\x00\s*[<>≤≥≠]")  # x < 5
    readings = [reading for reading, (before, _, after) in sides if not related.search(f"{before}\x00{after}")]
    percent = re.compile(r"\s*(?:\\?%|per\s?cent)")
    return [f"{reading}%" if percent.match(text.rpartition(reading)[2]) else reading for reading in readings]


# Parsed and compared once before the first fork, so that every worker starts with SymPy's and ANTLR's caches filled
# (the first polynomial comparison of a fresh process takes 0.3 s, the next ones 10 ms).
_WARM_UP = r"""
34|35  \frac{3}{8}|0.375  2\sqrt{3}|\sqrt{12}  x^2+3x+2|(x+1)(x+3)  [1,5)|(1,5]  \frac{3\pi}{4}|\frac{\pi}{3}
(2,-3)|\left(3,\frac{\pi}{2}\right)  \left\{1,2,3\right\}|3,2,1  \sin^2 x+\cos^2 x|1  50\%|\text{half}
\begin{pmatrix}1\\2\end{pmatrix}|\begin{pmatrix}1\\3\end{pmatrix}  e^{i\pi}+\log_2 8|2  \binom{5}{2}+4!|34
(-\infty,2)\cup(3,\infty)|x<2 \text{ or } x>3  x \leq 3|3 \geq x"""


def warm_up() -> None:
    """Enlarge math-verify's cache of parsed expressions (20 by default) and fill all caches."""
    from math_verify import parser

    parser.parse_latex_cached = functools.lru_cache(maxsize=4096)(parser.parse_latex_cached.__wrapped__)
    for pair in re.split(r"\s{2,}|\n", _WARM_UP.strip()):
        answer, _, truth = pair.partition("|")
        judge(f"\\boxed{{{answer}}}", truth, True)
    judge("The answer is 12.", "13", True)
