"""Which answers earn: labelled sets, where a response has its answer, and one spelling of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.rewards import SETS, read_pairs
from recipe.math.answers import MathScorer, Status
from recipe.math.answers.extraction import MAX_RESPONSE_CHARS, answer_of
from recipe.math.answers.spelling import SPELLINGS


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    with closing(MathScorer(n_workers=2, time_limit_s=20.0)) as scorer:
        yield scorer


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_labelled_answers_are_judged_and_no_attempt_earns(scorer: MathScorer, path: Path) -> None:
    unlike = [pair for pair in read_pairs(path) if scorer.judge(*pair[:2]).score != pair[2]]
    assert unlike == []


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{50}\%", "50%"),
        (r"\boxed{\left\{ x = 1 \right.}", r"\left\{ x = 1 \right."),
        (r"\boxed{\boxed{18}}", r"\boxed{18}"),
        (r"$\boxed{2}$, $\boxed{3}$ and $x=\boxed{5}$", "2, 3, 5"),
        (r"\boxed{58}, \boxed{}", None),
        (r"\boxed{7} and then \boxed{8", "7"),
        ("The answer is 5. Or is it?\nAnswer: $12$", "$12$"),
        ("**Final answer:**\n\n72", "72"),
        ("<answer>\n(3, 4)\n</answer>", "(3, 4)"),
        (r"\boxed{1}</think><think>\boxed{2}", None),
        (r"\boxed{9}" + "x" * MAX_RESPONSE_CHARS, None),
        ("<think>" + "x" * MAX_RESPONSE_CHARS + r"\boxed{9}", None),
        ("Final Answer: The final answer is $7$. I hope it is correct.", "$7$"),
        ("The answer is 8. <answer>7</answer>", "7"),
    ],
)
def test_where_a_response_has_its_answer(response: str, answer: str | None) -> None:
    assert answer_of(response) == answer


@pytest.mark.parametrize(("pattern", "by", "example", "becomes"), SPELLINGS)
def test_each_spelling_changes_its_example(pattern: str, by: str, example: str, becomes: str) -> None:
    assert example != becomes and re.sub(pattern, by, example) == becomes


@pytest.mark.parametrize(
    ("answer", "truth", "status"),
    [
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", "correct"),
        ("1.41421356237309504880", r"\sqrt{2}", "wrong"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1, 2)", "correct"),
        (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "wrong"),
        ("y > 2", "x > 2", "wrong"),
        (r"5 \text{ cm}^2", r"5 \text{ cm}^3", "wrong"),
        ("y > 2 - x", "x + y > 2", "correct"),
        (r"x > \ln 4", r"(2\ln 2, \infty)", "correct"),
        ("x + y = 5", "x^2 - 1 = (x-1)(x+1)", "wrong"),
        (r"\frac{N}{2}", "(N)/2", "correct"),
        ("C. 12.5", "12.5", "correct"),
        ("x > 1, y < 2", "x < 2, y > 1", "wrong"),
        ("xy = 1", "y = 1/x", "correct"),
        (r"2x + 1 \le y", r"y \ge 2x + 1", "correct"),
        ("(1, 2, 3)", "(1, 2)", "wrong"),
        ("(C) 12", "12", "correct"),
        (r"x < 1 \text{ or } x > 2", r"(-\infty, 1) \cup (2, \infty)", "correct"),
        ("2 = 5", "3 = 7", "wrong"),
        ("E_1 + 3.5", "3.5", "parse_failed"),
        ("x = 9 = 8", "8", "parse_failed"),
        (r"12 \text{ million}", "12", "wrong"),
        ("7t", "7", "wrong"),
        ("x^2 + 2", "x^2 + 2xy", "wrong"),
        ("(r + y)^2", "r^2 + y^2 + 2ry", "correct"),
        (r"\frac43\pi", r"\frac43\pi abc", "wrong"),
        (r"12\,\mathrm{cm^2}", "12", "correct"),
        (r"\text{C}", r"\text{A, C}", "wrong"),
        (r"\text{A}, \text{C}", "A, C", "correct"),
        ("on", "No", "wrong"),
        ("\u2212x \u2264 2\u03c0", r"x \ge -2\pi", "correct"),
        ("52\u00a0000 + x", "x + 52,000", "correct"),
        ("2\u00b9\u2070", "1024", "correct"),
        (r"\not= 5", "5", "parse_failed"),
        ("5", r"\frac{", "bad_truth"),
        ("1" * 401, "5", "refused"),
        ("(" * 9 + "x+1" + ")" * 9 + "y", "5", "refused"),
    ],
)
def test_verdicts_by_shape(scorer: MathScorer, answer: str, truth: str, status: str) -> None:
    assert scorer.judge(f"\\boxed{{{answer}}}", truth) == status


def test_integers_are_compared_without_a_process() -> None:
    scorer = MathScorer(n_workers=1)
    statuses = [scorer.judge(f"\\boxed{{{answer}}}", "73") for answer in ("073", "37", "")]
    assert statuses == [Status.CORRECT, Status.WRONG, Status.NO_ANSWER]
    assert scorer.judge(r"\boxed{-5}", "#### -5").score == 1
    assert not any(worker._process for worker in scorer._workers)
