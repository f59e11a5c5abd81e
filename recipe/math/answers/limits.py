"""Size limits inside a worker process: computations that would hang or fill the memory are refused before they start.

The time and memory limits of a worker already bound the damage of any input. But a killed worker costs its whole time
limit, so a batch with a few percent of hostile answers would spend most of its time on them. The limits here wrap the
functions that math-verify and SymPy call, where the sizes are known: the text of an expression before ANTLR parses it,
and the operands of a power, a factorial, a binomial, a sum or a product before they are evaluated. They are only
installed in the worker processes of this package.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

MAX_EXPRESSION_CHARS = 500
MAX_NESTING = 10
"""ANTLR needs about 0.1 s for every further level of parentheses."""
MAX_NUMBER_BITS = 1 << 22
"""Integers above 4.2 million bits (1.26 million digits) are not computed."""
MAX_PRECISION_BITS = 1 << 16
MAX_FACTORIAL = 100_000
MAX_TERMS = 10_000
"""Sums and products without a closed form are not written out beyond this many terms."""

_BRACKETS = re.compile(r"[{}()\[\]]")


class Refused(BaseException):
    """Raised when an expression is beyond the limits. A BaseException so that no `except Exception` swallows it."""


def install() -> None:
    """Wrap math-verify's parsers and SymPy's evaluation of large numbers, sums and products in this process.

    Raises AttributeError if a wrapped function no longer exists: these limits must then be adapted to the new release.
    """
    from latex2sympy2_extended.math_normalization import extract_boxed_content
    from math_verify import parser
    from sympy.concrete import summations
    from sympy.concrete.products import Product
    from sympy.core import evalf
    from sympy.core.numbers import Integer, Rational
    from sympy.functions.combinatorial import factorials, numbers

    def long_content(text: str, config: Any) -> bool:
        return _long_text(extract_boxed_content(text, mode=config.boxed))

    parser.normalize_latex = _guarded(parser.normalize_latex, long_content)
    for name in ("latex2sympy", "parse_expr"):
        setattr(parser, name, _guarded(getattr(parser, name), _long_text))

    for number in (Integer, Rational):
        number._eval_power = _guarded(number._eval_power, _large_power)
    for name in ("mpf_pow", "mpf_pow_int"):
        setattr(evalf, name, _guarded(getattr(evalf, name), _high_precision))

    for function in (factorials.factorial, factorials.binomial, factorials.factorial2, numbers.harmonic):
        function.eval = classmethod(_guarded(function.eval.__func__, _large_arguments))

    summations.eval_sum_direct = _guarded(summations.eval_sum_direct, _many_terms)
    Product._eval_product_direct = _guarded(Product._eval_product_direct, _many_terms)


def _guarded(evaluate: Callable[..., Any], beyond: Callable[..., bool]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if beyond(*args, **kwargs):
            raise Refused
        return evaluate(*args, **kwargs)

    return guarded


def _long_text(text: str, *_: Any, **__: Any) -> bool:
    """Whether an expression is too long or too deeply nested to parse in reasonable time."""
    if len(text) > MAX_EXPRESSION_CHARS or text.count("|") > 2 * MAX_NESTING:
        return True
    steps = (1 if match.group() in "{([" else -1 for match in _BRACKETS.finditer(text))
    return max(itertools.accumulate(steps), default=0) > MAX_NESTING


def _large_power(base: Any, exponent: Any) -> bool:
    bits = max(abs(base.p).bit_length(), base.q.bit_length())
    return bool(exponent.is_Integer) and bits > 1 and abs(exponent.p) * bits > MAX_NUMBER_BITS


def _large_arguments(_: Any, *args: Any) -> bool:
    return any(getattr(arg, "is_Integer", False) and abs(arg.p) > MAX_FACTORIAL for arg in args)


def _high_precision(base: Any, exponent: Any, precision: int, *_: Any) -> bool:
    # SymPy asks for as many bits as the integer part of a result has, 1.2 billion for 9^(9^9).
    return precision > MAX_PRECISION_BITS


def _many_terms(*args: Any) -> bool:
    _, first, last = args[-1]
    terms = last - first
    return bool(terms.is_Integer and terms.p > MAX_TERMS)
