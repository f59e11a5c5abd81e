"""Verdicts of the scorer against direct math-verify and against labels given by hand."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rewards import score_all
from recipe.math.answers import MathScorer, Status
from recipe.math.answers.extraction import MAX_RESPONSE_CHARS, bounded, decide_exactly, sole_box

LABELLED = [
    json.loads(line)
    for line in (Path(__file__).parent / "assets" / "labelled_answers.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    with MathScorer(n_workers=1, normalise=False) as scorer:
        yield scorer


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def direct(response: str, truth: str) -> float:
    """math-verify on the whole response, called as verl 0.9.1's `math_verify` scorer calls it, but without limits in
    wall-clock time: on a busy machine an ordinary answer exceeds them, and the verdict is no."""
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    gold = parse(f"\\boxed{{{truth}}}", (LatexExtractionConfig(),), parsing_timeout=None)
    parsed = parse(response, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None)
    return float(any(verify(g, p, timeout_seconds=None) for p in parsed for g in gold))


@pytest.mark.slow  # ten CPU seconds; samples of other pairs are in test_answers_kinds.py
def test_labelled_set_agrees_with_direct_math_verify_and_mostly_with_the_labels(scorer: MathScorer) -> None:
    verdicts = score_all(scorer, [row["response"] for row in LABELLED], [row["truth"] for row in LABELLED])
    expected = [direct(row["response"], row["truth"]) for row in LABELLED]
    disagreements = [
        (row, verdict)
        for row, verdict, score in zip(LABELLED, verdicts, expected, strict=True)
        if verdict.score != score
    ]
    assert disagreements == []
    wrong = [row for row, verdict in zip(LABELLED, verdicts, strict=True) if bool(verdict.score) != row["label"]]
    # All known errors are right answers that math-verify 0.9 does not recognise; accepting a wrong one would be worse.
    assert all(row["label"] for row in wrong)
    assert len(wrong) / len(LABELLED) < 0.03
    unjudged = {Status.TIMEOUT, Status.CRASHED, Status.REFUSED, Status.BAD_TRUTH}
    assert not unjudged & {verdict.status for verdict in verdicts}


FILLER = "We add $12$ and $30$, so $x = 42$ and the second value is 7.\nThis holds for $n \\geq 3$. "
ENDINGS = (
    r"So the final answer is $\boxed{%s}$.", "**Final Answer**\n\n\\[\n\\boxed{%s}\n\\]\n",
    r"Thus $y = \boxed{%s}$.", r"\boxed{%s}", r"\boxed{%s} \)", "Therefore the answer is $%s$.",
    "The final answer is $%s$.", "Answer: %s", "The final answer is $%s$. I hope it is correct.",
    r"\boxed{%s} and $x=3$.", r"\boxed{1}, \boxed{%s}", r"The answer 5 was wrong. The answer is $%s$.",
    "answer\n%s", r"\boxed{%s}\%%", r"\fbox{3} \boxed{%s}", "It is %s",
)  # fmt: skip


def random_response(rng: random.Random) -> tuple[str, str]:
    row = rng.choice([row for row in LABELLED if row["response"].startswith("\\boxed{") and len(row["response"]) < 60])
    content = sole_box(row["response"]) or "3"
    return FILLER * rng.randint(0, 3) + rng.choice(ENDINGS) % content, row["truth"]


@pytest.mark.slow
def test_whole_responses_agree_with_direct_math_verify(scorer: MathScorer) -> None:
    rng, n = random.Random(1), 4_000
    pairs = [random_response(rng) for _ in range(n)]
    for pair, verdict in zip(pairs, score_all(scorer, *map(list, zip(*pairs, strict=True))), strict=True):
        assert verdict.score == direct(*pair), (pair, verdict)


def test_an_integer_in_an_only_box_is_decided_as_the_workers_do() -> None:
    endings = ("", ".", r"\%", " %", r"\)", r" or \boxed{3}", "</think> so it is 7")
    with MathScorer(n_workers=1) as kinds:
        for content, truth, ending in itertools.product(("7", "-7", "0", "07", "8"), ("7", "-7", "0"), endings):
            response = f"So \\boxed{{{content}}}{ending}"
            judged = kinds._pool.run(response, truth, True)
            box = sole_box(response)
            if box is not None and (equal := decide_exactly(box, truth)) is not None:
                assert (judged is Status.CORRECT) is equal, response
            assert kinds.score(response, truth).status is judged


@pytest.mark.parametrize(
    ("response", "truth", "status"),
    [
        ("", "1", Status.NO_ANSWER),
        ("No number here at all.", "1", Status.NO_ANSWER),
        (r"\boxed{\frac{1}{}}", "1", Status.PARSE_FAILED),
        (r"\boxed{2}", "1", Status.WRONG),
        (r"\boxed{1}", "1", Status.CORRECT),
        (r"\boxed{x+1}", "x-1", Status.WRONG),
        (r"\boxed{9^{9^{9^9}}}", "1", Status.REFUSED),
        (r"\boxed{" + "(" * 50 + "1" + ")" * 50 + "}", "1", Status.REFUSED),
        (r"\boxed{1000000000!}", "1", Status.REFUSED),
        (r"\boxed{2}", "", Status.BAD_TRUTH),
        (r"\boxed{x>1}", r"x\ne1", Status.COMPARE_FAILED),
    ],
)
def test_statuses(scorer: MathScorer, response: str, truth: str, status: Status) -> None:
    verdict = scorer.score(response, truth)
    assert verdict.status is status
    assert verdict.score == (1.0 if status is Status.CORRECT else 0.0)


def test_a_box_is_judged_once_and_a_refusal_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with MathScorer(n_workers=1) as kinds:
        run, statuses = kinds._pool.run, iter([Status.REFUSED, Status.CRASHED])
        calls: list[str] = []

        def judged(response: str, truth: str, normalise: bool) -> Status:
            calls.append(response)
            return next(statuses, None) or run(response, truth, normalise)

        monkeypatch.setattr(kinds._pool, "run", judged)
        verdicts = [kinds.score(f"Way {i}. \\boxed{{\\sqrt{{8}}+y}}", r"2\sqrt{2}+y").status for i in range(5)]
    assert verdicts == [Status.REFUSED, Status.CRASHED, *[Status.CORRECT] * 3]
    assert len(calls) == 3


def test_sole_box() -> None:
    assert sole_box(r"so \boxed{3}") == "3"
    assert sole_box("\\[\n\\boxed{ \\frac{1}{2} }\n\\].") == r"\frac{1}{2}"
    assert sole_box(r"<think>\boxed{5}</think>\boxed{6} or so") == "6"
    others = (r"\boxed{3}\%", r"\boxed{2} \boxed{3}", r"\fbox{2} \boxed{3}", r"\boxed{3", r"\boxed{}", "no box")
    assert [sole_box(response) for response in others] == [None] * 6


def test_bounded_keeps_the_end_and_the_last_box() -> None:
    text = r"\boxed{5} " + "words " * MAX_RESPONSE_CHARS
    assert bounded(text).startswith(r"\boxed{5} ")
    assert len(bounded(text)) < 2 * MAX_RESPONSE_CHARS
    assert bounded("short") == "short"
    assert bounded(r"\boxed{1}" * 100).count(r"\boxed") == 64


def test_wrong_arguments_are_named() -> None:
    for arguments in ({"n_workers": 0}, {"time_limit_s": 0.0}, {"memory_limit_mb": 10}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            MathScorer(**arguments)  # type: ignore[arg-type]


def test_plain_integers_need_no_process() -> None:
    with MathScorer(n_workers=1) as scorer:
        assert scorer.score(r"\boxed{34}", "34").score == 1.0
        assert scorer._pool._launcher is None
