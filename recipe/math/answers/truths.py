"""Ground truths that are no answers: code, records and markup, which other tasks have in the same column."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Final

from recipe.math.answers.extraction import answer_texts
from recipe.math.answers.spelling import trusted

_RECORD: Final = re.compile(r"\{\s*[\"']|\[\s*(?:\{\s*)?[\"']|\A\s*(?:\{\s*\}|\[\s*\])\s*\Z")
#: Several words of which a response would need one; a list of numbers may be one answer.
_ALTERNATIVES: Final = re.compile(r"""\s*\[\s*(["'])[^\W\d]{2}[^"']*\1\s*,""")
#: A name of markup, or a pair: x<y and z>w has neither.
_TAG: Final = re.compile(
    r"</?(?:html|head|body|div|span|svg|img|br|table|ul|ol|pre|code|form|input|button|script|style|think|answer"
    r"|tool_call|tool_response|function|search)\b[^<>]*>|<(?P<name>[a-zA-Z][\w-]*)(?:\s[^<>]*)?>.*</(?P=name)\s*>",
    re.DOTALL,
)
_STATEMENT: Final = re.compile(r"^\s*(?:SELECT\b.+\bFROM\b|#include\b|diff --git |function\s+\w+\s*\()", re.MULTILINE)
_CODE: Final = (ast.FunctionDef, ast.ClassDef, ast.Assert, ast.Import, ast.ImportFrom, ast.For, ast.While, ast.Return)


def no_answer(truth: str) -> str:
    r"""What a ground truth is that nobody could write as an answer; empty if it may be one.

    >>> no_answer('{"inputs": ["1"], "outputs": ["2"]}'), no_answer("assert f(1) == 2"), no_answer(r"\frac{1}{2}")
    ('a record', 'code', '')
    """
    text = _alone(truth)
    if _RECORD.search(text) or _ALTERNATIVES.match(truth):
        return "a record"
    if _TAG.search(text):
        return "markup"
    return "code" if _STATEMENT.search(text) or _is_python(text) else ""


def words_of(truth: str) -> int:
    r"""The number of words of two letters or more in a ground truth, commands aside.

    >>> words_of(r"\text{red, green, and blue}"), words_of("We get five.\n#### 5")
    (4, 0)
    """
    return len(re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", " ", _alone(truth))))


def _alone(truth: str) -> str:
    """The answer in a ground truth that has one in a box or behind a mark; else all of it."""
    text = trusted(truth)
    return next(iter(answer_texts(text).texts), text)


def _is_python(text: str) -> bool:
    """Whether a text has statements of Python, or calls with texts in quotes."""
    try:
        with warnings.catch_warnings(action="ignore"):
            nodes = list(ast.walk(ast.parse(text.strip())))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    calls = [argument for node in nodes if isinstance(node, ast.Call) for argument in ast.walk(node)]
    return any(isinstance(node, _CODE) for node in nodes) or any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) for node in calls
    )
