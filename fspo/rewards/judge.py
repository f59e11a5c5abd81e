"""One verdict by math-verify, with the reason, where math-verify itself only returns `False`."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

from fspo.rewards.limits import Refused
from fspo.rewards.verdict import Status


def judge(part: str | None, response: str, truth: str, exact: bool = False) -> tuple[Status, bool]:
    r"""The verdict on a response, and whether it depends on `part` and `truth` alone (so that it may be cached).

    Args:
        part: the decisive part of the response if `extraction.decisive_part` found one, else None.
        response: the whole response, used when there is no such part or nothing can be read from it.
        truth: the ground truth, LaTeX without a box.
        exact: a pair that `normalise` has rewritten; it is compared by `_compare_exactly` first.

    Two rules are those of verl 0.9.1's `math_verify` scorer: the targets (LaTeX in a box for the truth; expressions and
    LaTeX for the response), and that a match of any pair of readings counts. Exceptions become statuses: running out of
    memory or recursion is a failed comparison, and a limit of `limits` is REFUSED.
    """
    try:
        gold = _parse_truth(truth)
    except (Exception, Refused):
        gold = ()
    if not gold:
        return Status.BAD_TRUTH, True
    if part is not None:
        status = _judge_text(part, gold, exact)
        if status not in (Status.NO_ANSWER, Status.PARSE_FAILED):
            return status, True
    return _judge_text(response, gold, exact), False


def _judge_text(text: str, gold: tuple[Any, ...], exact: bool = False) -> Status:
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    targets = (ExprExtractionConfig(), LatexExtractionConfig())
    try:
        predictions = parse(text, targets, parsing_timeout=None, raise_on_error=True)
    except Refused:
        return Status.REFUSED
    except Exception:
        return Status.PARSE_FAILED
    if not predictions:
        return Status.NO_ANSWER
    failed = False
    for target, prediction in product(gold, predictions):
        try:
            equal = _compare_exactly(target, prediction, text) if exact else None
            if equal is None:
                equal = verify(target, prediction, timeout_seconds=None, raise_on_error=True)
            if equal:
                return Status.CORRECT
        except Refused:
            return Status.REFUSED
        except Exception:
            failed = True
    if failed:
        return Status.COMPARE_FAILED
    return Status.PARSE_FAILED if all(isinstance(p, str) for p in predictions) else Status.WRONG


def _compare_exactly(target: Any, prediction: Any, text: str) -> bool | None:
    """What math-verify does not compare as a reader would; None where its own comparison decides.

    - A decimal equals an expression with roots, pi or functions only if both agree to 50 digits. math-verify rounds
      them to 6. A decimal is one that stands in the text: SymPy makes one of e^{0.5}, too.
    - `i` is the imaginary unit in numbers without any other symbol; for math-verify it is a variable.
    """
    import sympy
    from math_verify import verify

    sides = [side.rhs if isinstance(side, sympy.Eq) else side for side in (target, prediction)]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return None
    gold, answer = sides
    symbols = {symbol.name for side in sides for symbol in side.free_symbols}
    if isinstance(answer, sympy.Float) and not gold.free_symbols and not gold.atoms(sympy.Float):
        if gold.doit().is_Rational or str(answer).strip("-0")[:9] not in text:
            return None
        return bool(abs(gold.evalf(60) - sympy.Rational(str(answer))) < sympy.Rational(1, 10**50))
    if symbols == {"i"}:
        gold, answer = (
            side.subs({symbol: sympy.I for symbol in side.free_symbols}).doit().expand(complex=True) for side in sides
        )
        return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    return None


@functools.lru_cache(maxsize=4096)
def _parse_truth(truth: str) -> tuple[Any, ...]:
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig

    return tuple(parse(f"\\boxed{{{truth}}}", (LatexExtractionConfig(),), parsing_timeout=None, raise_on_error=True))


# Parsed and compared once before the first fork, so that every worker starts with SymPy's and ANTLR's caches filled
# (the first polynomial comparison of a fresh process takes 0.3 s, the next ones 10 ms).
_WARM_UP = (
    ("34", "35"),
    (r"\frac{3}{8}", "0.375"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("x^2+3x+2", "(x+1)(x+3)"),
    ("[1,5)", "(1,5]"),
    ("(2,-3)", r"\left(3,\frac{\pi}{2}\right)"),
    (r"\frac{3\pi}{4}", r"\frac{\pi}{3}"),
    (r"\left\{1,2,3\right\}", "3,2,1"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"x \leq 3", r"3 \geq x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"e^{i\pi}+\log_2 8", "2"),
    (r"50\%", r"\text{half}"),
    (r"\binom{5}{2}+4!", "34"),
    (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
)


def warm_up() -> None:
    """Enlarge math-verify's cache of parsed expressions (20 by default) and fill all caches."""
    from math_verify import parser

    parser.parse_latex_cached = functools.lru_cache(maxsize=4096)(parser.parse_latex_cached.__wrapped__)
    for answer, truth in _WARM_UP:
        judge(f"\\boxed{{{answer}}}", "", truth)
    _judge_text("The answer is 12.", _parse_truth("13"))
