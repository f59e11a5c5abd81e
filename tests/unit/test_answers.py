"""Why an answer has its verdict, and one spelling of it; which answers earn: promises/test_task.py, assets/*.jsonl."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from recipe.math.answers import MathScorer, Status
from recipe.math.answers.extraction import MAX_RESPONSE_CHARS
from recipe.math.answers.spelling import SPELLINGS


@pytest.mark.parametrize(("pattern", "by", "example", "becomes"), SPELLINGS)
def test_each_spelling_changes_its_example(pattern: str, by: str, example: str, becomes: str) -> None:
    assert example != becomes and re.sub(pattern, by, example) == becomes


VERDICTS = [
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", "correct"),
    ("E_1 + 3.5", "3.5", "parse_failed"),
    ("x = 9 = 8", "8", "parse_failed"),
    ("7t", "7", "wrong"),
    (r"\not= 5", "5", "parse_failed"),
    ("5", r"\frac{", "bad_truth"),
    ("1" * 401, "5", "refused"),
    ("(" * 9 + "x+1" + ")" * 9 + "y", "5", "refused"),
]


def test_a_verdict_says_why() -> None:
    with closing(MathScorer(n_workers=1, time_limit_s=20.0)) as scorer:
        given = [(answer, truth, scorer.judge(f"\\boxed{{{answer}}}", truth)) for answer, truth, _ in VERDICTS]
    assert given == VERDICTS


def test_integers_are_compared_without_a_process() -> None:
    scorer = MathScorer(n_workers=1)
    filler = "x" * MAX_RESPONSE_CHARS
    unread = (r"\boxed{}", r"\boxed{73}" + filler, f"<think>{filler}" + r"\boxed{73}")
    statuses = [scorer.judge(response, "73") for response in (r"\boxed{073}", r"\boxed{37}", *unread)]
    assert statuses == [Status.CORRECT, Status.WRONG, *[Status.NO_ANSWER] * 3]
    assert scorer.judge(r"\boxed{-5}", "#### -5").score == 1
    assert not any(worker._process for worker in scorer._workers)
