"""Size limits inside a worker process: computations that would hang or fill the memory are refused before they start.

The time and memory limits of a worker already bound the damage of any input. But a killed worker costs its whole time
limit, so a batch with a few percent of hostile answers would spend most of its time on them. The limits here wrap the
functions that math-verify and SymPy call, where the sizes are known: the text of an expression before ANTLR parses it,
and the operands of a power, a factorial, a binomial, a sum or a product before they are evaluated. They are only
installed in the worker processes of this package.
"""

from __future__ import annotations

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


def check_expression(text: str) -> None:
    """Refuse an expression that is too long or too deeply nested to parse in reasonable time."""
    if len(text) > MAX_EXPRESSION_CHARS or text.count("|") > 2 * MAX_NESTING:
        raise Refused
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += 1 if match.group() in "{([" else -1
        if depth > MAX_NESTING:
            raise Refused


def install() -> None:
    """Wrap math-verify's parsers and SymPy's evaluation of large numbers, sums and products in this process.

    Raises AttributeError if a wrapped function no longer exists: these limits must then be adapted to the new release.
    """
    from math_verify import parser
    from sympy.concrete import summations
    from sympy.concrete.products import Product
    from sympy.core import evalf
    from sympy.core.numbers import Integer, Rational
    from sympy.functions.combinatorial import factorials, numbers

    parser.normalize_latex = _checking_content(parser.normalize_latex)
    for name in ("latex2sympy", "parse_expr"):
        setattr(parser, name, _checking_text(getattr(parser, name)))

    for number in (Integer, Rational):
        number._eval_power = _checking_power(number._eval_power)
    for name in ("mpf_pow", "mpf_pow_int"):
        setattr(evalf, name, _checking_precision(getattr(evalf, name)))

    for function in (factorials.factorial, factorials.binomial, factorials.factorial2, numbers.harmonic):
        function.eval = classmethod(_checking_arguments(function.eval.__func__))

    summations.eval_sum_direct = _checking_terms(summations.eval_sum_direct)
    Product._eval_product_direct = _checking_terms(Product._eval_product_direct)


def _checking_text(parse: Callable[..., Any]) -> Callable[..., Any]:
    def checked(text: str, *args: Any, **kwargs: Any) -> Any:
        check_expression(text)
        return parse(text, *args, **kwargs)

    return checked


def _checking_content(normalize: Callable[..., Any]) -> Callable[..., Any]:
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    def checked(text: str, config: Any) -> Any:
        check_expression(extract_boxed_content(text, mode=config.boxed))
        return normalize(text, config)

    return checked


def _checking_power(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def checked(base: Any, exponent: Any) -> Any:
        if exponent.is_Integer:
            bits = max(abs(base.p).bit_length(), base.q.bit_length())
            if bits > 1 and abs(exponent.p) * bits > MAX_NUMBER_BITS:
                raise Refused
        return evaluate(base, exponent)

    return checked


def _checking_arguments(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def checked(cls: Any, *args: Any) -> Any:
        if any(getattr(arg, "is_Integer", False) and abs(arg.p) > MAX_FACTORIAL for arg in args):
            raise Refused
        return evaluate(cls, *args)

    return checked


def _checking_precision(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def checked(base: Any, exponent: Any, precision: int, *args: Any) -> Any:
        # SymPy asks for as many bits as the integer part of a result has, 1.2 billion for 9^(9^9).
        if precision > MAX_PRECISION_BITS:
            raise Refused
        return evaluate(base, exponent, precision, *args)

    return checked


def _checking_terms(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        _, first, last = args[-1]
        terms = last - first
        if terms.is_Integer and terms.p > MAX_TERMS:
            raise Refused
        return evaluate(*args)

    return checked
