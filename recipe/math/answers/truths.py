"""Ground truths that are no answers: code, records and prose, which other tasks have in the same column."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Final

from recipe.math.answers.extraction import answer_texts
from recipe.math.answers.reading import trusted

#: More words than a policy writes as its author did; fewer if there are numbers between them that are not read.
_MOST_WORDS: Final = 10
_MOST_WORDS_UNREAD: Final = 3
_RECORD: Final = re.compile(r"\{\s*[\"']|\[\s*(?:\{\s*)?[\"']|\A\s*(?:\{\s*\}|\[\s*\])\s*\Z")
#: Several words of which a response would need one; a list of numbers may be one answer.
_ALTERNATIVES: Final = re.compile(r"""\s*\[\s*(["'])[^\W\d]{2}[^"']*\1\s*,""")
_TAG: Final = re.compile(r"</?[a-zA-Z][\w-]*(?:\s[^<>]*)?/?>")
_STATEMENT: Final = re.compile(r"^\s*(?:SELECT\b.+\bFROM\b|#include\b|diff --git |function\s+\w+\s*\()", re.MULTILINE)
_CODE: Final = (ast.FunctionDef, ast.ClassDef, ast.Assert, ast.Import, ast.ImportFrom, ast.For, ast.While, ast.Return)


def no_answer(truth: str, unread: bool = False) -> str:
    r"""What a ground truth is that nobody could write as an answer; empty if it may be one.

    ``unread`` tells that no other answer can equal it.

    >>> no_answer('{"inputs": ["1"], "outputs": ["2"]}'), no_answer("assert f(1) == 2"), no_answer(r"\frac{1}{2}")
    ('a record', 'code', '')
    """
    text = trusted(truth)
    text = next(iter(answer_texts(text).texts), text)
    if _RECORD.search(text) or _ALTERNATIVES.match(truth):
        return "a record"
    if _TAG.search(text):
        return "markup"
    if _STATEMENT.search(text) or _is_python(text):
        return "code"
    words = re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", " ", text))
    most = _MOST_WORDS_UNREAD if unread else _MOST_WORDS
    return f"prose of {len(words)} words" if len(words) > most else ""


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
