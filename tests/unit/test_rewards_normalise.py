"""Normalisation before math-verify: right answers gained, no wrong one, and nothing else touched."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from benchmarks.rewards import PAIRS as PAIRS_FILE
from benchmarks.rewards import score_all
from fspo.rewards import MathScorer, Status
from fspo.rewards.extraction import bounded, decisive_part
from fspo.rewards.normalise import normalised

#: [class, part, label, ground truth, response]; `python -m benchmarks.rewards` counts all of them.
PAIRS = [json.loads(line) for line in PAIRS_FILE.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    with MathScorer(n_workers=1) as scorer:
        yield scorer


def rewritten(response: str, truth: str) -> tuple[str, str] | None:
    text = bounded(response)
    return normalised(decisive_part(text), text, truth)


def assert_gain(scorer: MathScorer, pairs: list[list[object]], least_share: float) -> None:
    verdicts = score_all(scorer, [str(pair[4]) for pair in pairs], [str(pair[3]) for pair in pairs])
    assert not {verdict.status for verdict in verdicts} & {Status.TIMEOUT, Status.CRASHED}
    right = [verdict for verdict, pair in zip(verdicts, pairs, strict=True) if pair[2]]
    wrong = [(verdict, pair) for verdict, pair in zip(verdicts, pairs, strict=True) if not pair[2]]
    assert [pair for verdict, pair in wrong if verdict.score and verdict.plain is not Status.CORRECT] == []
    assert all(verdict.score for verdict in right if verdict.plain is Status.CORRECT)
    assert sum(verdict.score for verdict in right) >= least_share * len(right)


def test_a_sample_of_the_pairs_gains_right_answers_and_no_wrong_ones(scorer: MathScorer) -> None:
    assert_gain(scorer, PAIRS[::20], least_share=0.6)


@pytest.mark.slow
def test_all_pairs_gain_right_answers_and_no_wrong_ones(scorer: MathScorer) -> None:
    assert_gain(scorer, PAIRS, least_share=0.65)


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"\boxed{34,}", "34", ("34", "34")),
        (r"\boxed{**34**}", "34", ("34", "34")),
        (r"\boxed{50\%}", "50", ("50", "50")),
        (r"\boxed{50\%}", r"\frac12", (r"\frac{1}{2}", r"\frac{1}{2}")),
        (r"\boxed{\frac1{20}\%}", r"0.05\%", (r"\frac{1}{20}", r"\frac{1}{20}")),
        (r"\boxed{50\%}", "0.5", (r"\frac{1}{2}", r"\frac{1}{2}")),
        (r"\boxed{0.5\%}", "0.5", (r"\frac{1}{200}", r"\frac{1}{2}")),
        (r"\boxed{33}. Wait, it is \boxed{34}", "34", ("34", "34")),
        (r"\boxed{\sin 30^\circ}", r"\frac12", (r"\sin\left(\frac{1\pi}{6}\right)", r"\frac12")),
        (r"\boxed{0.1\overline{6}}", r"\frac16", (r"\frac{1}{6}", r"\frac16")),
    ],
)
def test_rules(response: str, truth: str, expected: tuple[str, str]) -> None:
    assert rewritten(response, truth) == (f"\\boxed{{{expected[0]}}}", expected[1])


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        (r"\boxed{34}", "34"),
        (r"\boxed{35}", "34"),
        (r"\boxed{2} and \boxed{3}", "3"),  # joined: one answer, and not 3
        (r"\boxed{2} first, then \boxed{3}", "2,3"),  # the truth is a list
        (r"\boxed{\text{(A) or (B)}}", "A"),
        (r"\boxed{1  1\%}", "11"),
        (r"\boxed{2\le x\le 5, x\in\mathbb{Z}}", "[2,5]"),
        (r"\boxed{x>2}", "5"),
        (r"\boxed{0.5}", r"\frac12"),
        ("about 34", "34"),
    ],
)
def test_no_rule_applies(response: str, truth: str) -> None:
    assert rewritten(response, truth) is None


def test_a_decimal_is_not_an_irrational_number(scorer: MathScorer) -> None:
    for answer in ("1.41421356", "+1.41421356", r"1.41421356\text{ cm}", r"AB = 1.41421356", r"1.41421356^\circ"):
        verdict = scorer.score(rf"\boxed{{{answer}}}", r"\sqrt{2}")
        assert (verdict.status, verdict.plain) == (Status.WRONG, Status.CORRECT), answer
    for answer in (r"\sqrt{2}\approx 1.41421356", r"0.5\sqrt{8}", r"0.5\cdot\sqrt{8}\text{ cm}"):
        assert scorer.score(rf"\boxed{{{answer}}}", r"\sqrt{2}").score == 1.0, answer
    assert scorer.score(r"\boxed{2.0}", r"\sqrt{4}").score == 1.0
    for answer, truth in (("e^{0.5}", r"\sqrt{e}"), ("x=e^{-0.5}", r"\frac{1}{\sqrt{e}}"), ("e^{0.5}", r"e^{\frac12}")):
        assert scorer.score(rf"\boxed{{{answer}}}", truth).score == 1.0, answer


def test_without_normalisation_the_verdict_is_math_verifys(scorer: MathScorer) -> None:
    with MathScorer(n_workers=1, normalise=False) as plain:
        for response, truth in ((r"\boxed{50\%}", "50"), (r"\boxed{1.41421356}", r"\sqrt{2}")):
            verdict = plain.score(response, truth)
            assert verdict.status is verdict.plain is scorer.score(response, truth).plain
