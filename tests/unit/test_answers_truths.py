"""Ground truths of other tasks, which no response of this one could match, are told from answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.math.answers.truths import no_answer

ASSETS = Path(__file__).parent / "assets"


@pytest.mark.parametrize(
    ("truth", "what"),
    [
        ('{"inputs": ["1\\n"], "outputs": ["2\\n"]}', "record"),  # Skywork-OR1 and TACO code
        ('{"ids": ["punctuation:no_comma"], "kwargs": [{}]}', "record"),  # IFEval
        ("{'target': ['Paris', 'paris']}", "record"),  # Search-R1
        ('["Paris", "paris"]', "record"),
        ('[{"name": "search", "arguments": {}}]', "record"),
        ("{}", "record"),
        ("[ ]", "record"),
        ("<tool_call>\nsearch\n</tool_call>", "markup"),
        ('<svg width="8"/>', "markup"),
        ("assert f(1) == 2\nassert f(2) == 3", "code"),
        ("def f(x):\n    return x", "code"),
        ("import os", "code"),
        ('[get_weather(city="Paris")]', "code"),
        ("SELECT name FROM users WHERE age > 3", "code"),
        ("#include <stdio.h>\nint main() {}", "code"),
        ("diff --git a/x b/x", "code"),
        ("<a href='x'>x</a>", "markup"),
    ],
)
def test_code_records_and_markup_are_no_answers(truth: str, what: str) -> None:
    assert what in no_answer(truth), no_answer(truth)


@pytest.mark.parametrize(
    "truth",
    [
        *('["15"]', "['yes']", '"Paris"', "#### 18", "We add both of them, and that makes it easy to see.\n#### 18"),
        *(r"x<a \text{ or } x>b", r"x<y \text{ and } z>w", "a<b and c>d", "p<b>q"),
        *(r"\text{red, green, and blue}", r"\text{(i), (ii), and (iv) are true}", "Alice, Bob, Carol, and Dave"),
        *("[[1,2],[3,4]]", r"{{5 \choose 2}}", r"\left\{ (x,y) \mid x<y \right\}", "1<x<2", "x<y, y>z", "f(x)=2x"),
        *("Jane Smith", "March 14, 1990", "C++", "x = 5", r"\text{for all } n \ge 1 \text{ with } n \ne 3", "巴黎"),
    ],
)
def test_answers_stay_answers(truth: str) -> None:
    assert no_answer(truth) == ""


def test_no_labelled_truth_is_taken_for_something_else() -> None:
    truths = set()
    for file in ("answer_kinds", "answer_siblings", "labelled_answers"):
        lines = (ASSETS / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
        truths |= {row["truth"] if isinstance(row, dict) else row[-2] for row in map(json.loads, lines)}
    assert len(truths) > 400
    assert {truth: what for truth in truths if (what := no_answer(str(truth)))} == {}
