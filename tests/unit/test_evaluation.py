"""avg@k, pass@k and their intervals."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages import unpadded
from scipy.stats import binomtest

from fspo.fairness.bootstrap import ratio_interval
from recipe.math.evaluation import Record, conclude_evaluation, evaluate, main, pass_at_k, read_records


@example((10_000, 1_000, 500))
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
@settings(max_examples=200)
def test_pass_at_k_is_the_closed_form(case: tuple[int, int, int]) -> None:
    n, correct, k = case
    closed = 1 - Fraction(math.comb(n - correct, k), math.comb(n, k))
    assert pass_at_k(n, correct, k) == pytest.approx(float(closed), abs=1e-12)


def coverage(n_problems: int, responses: int, trials: int, seed: int) -> float:
    """Share of intervals that hold the true accuracy of a population of problems, Beta(0.6, 0.9) distributed."""
    rng = np.random.default_rng(seed)
    hits = 0
    for trial in range(trials):
        means = rng.binomial(responses, rng.beta(0.6, 0.9, size=n_problems)) / responses
        estimate = ratio_interval(means, np.ones(n_problems), resamples=1_000, seed=trial)
        hits += estimate.low <= 0.4 <= estimate.high
    return hits / trials


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    # 0.95 +- 3 standard errors of 200 trials, and one percent for the bootstrap's own error
    assert 0.89 <= coverage(30, 8, trials=200, seed=0) <= 0.99


@pytest.mark.slow
@pytest.mark.parametrize(("n_problems", "responses"), [(30, 8), (30, 32), (40, 16), (500, 4)])
def test_coverage_at_the_sizes_of_the_test_sets(n_problems: int, responses: int) -> None:
    assert 0.935 <= coverage(n_problems, responses, trials=2_000, seed=1) <= 0.97


def single(accuracy: float, trials: int, seed: int) -> float:
    """Coverage at 30 problems of that accuracy with one response each."""
    rng, hits = np.random.default_rng(seed), 0
    for _ in range(trials):
        scores = rng.random(30) < accuracy
        result = evaluate([Record("s", str(i), 1, float(score)) for i, score in enumerate(scores)])["s"]["avg"]
        hits += result["low"] <= accuracy <= result["high"]
    return hits / trials


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_where_all_problems_have_one_value_the_interval_is_wilsons(value: float) -> None:
    result = evaluate([Record("s", str(i), 1, value) for i in range(30)])["s"]
    low, high = result["avg"]["low"], result["avg"]["high"]
    exact = binomtest(int(30 * value), 30).proportion_ci(0.95, "wilson")
    assert (low, high) == pytest.approx((exact.low, exact.high)) and high - low > 0.1
    assert result["pass"]["1"] == result["avg"] and result["by_length"][0]["accuracy"] == result["avg"]


@pytest.mark.slow
@pytest.mark.parametrize("accuracy", [0.05, 0.95])
def test_a_weak_or_strong_policy_is_covered_too(accuracy: float) -> None:
    assert single(accuracy, trials=400, seed=2) > 0.9


def test_k_are_powers_of_two_and_the_number_of_responses() -> None:
    assert list(evaluate(records())["aime24"]["pass"]) == ["1", "2", "4"]
    three = [Record("s", problem, 1, float(i)) for problem in "ab" for i in (0, 0, 1)]
    assert list(evaluate(three)["s"]["pass"]) == ["1", "2", "3"]
    for k in (0, 4):
        with pytest.raises(ValueError, match=rf"pass@{k} of 3"):
            pass_at_k(3, 1, k)


def test_interval_of_a_ratio_weighs_problems_by_their_counts() -> None:
    estimate = ratio_interval([3.0, 0.0, 1.0], [3.0, 1.0, 0.0001])
    assert estimate.value == pytest.approx(4.0 / 4.0001)
    assert estimate.low <= estimate.value <= estimate.high
    assert math.isnan(ratio_interval([1.0], [1.0]).low)


def records() -> list[Record]:
    scores = {"a": [1, 1, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 1, 1], "d": [0, 1, 0, 0]}
    return [
        Record("aime24", problem, 100 + 600 * j, float(score))
        for problem, values in scores.items()
        for j, score in enumerate(values)
    ] + [Record("amc23", "x", 5, 1.0)]


def test_evaluate_by_hand() -> None:
    result = evaluate(records())
    aime = result["aime24"]
    assert (aime["problems"], aime["responses"]) == (4, 16)
    assert aime["avg"]["value"] == pytest.approx((0.5 + 0 + 1 + 0.25) / 4)
    assert aime["pass"]["1"]["value"] == pytest.approx(aime["avg"]["value"])
    assert aime["pass"]["4"]["value"] == pytest.approx(3 / 4)
    assert aime["pass"]["2"]["value"] == pytest.approx((pass_at_k(4, 2, 2) + 0 + 1 + pass_at_k(4, 1, 2)) / 4)
    bins = {(row["low"], row["high"]): row for row in aime["by_length"]}
    assert bins.keys() == {(64, 128), (512, 1024), (1024, 2048)}
    assert [bins[64, 128]["responses"], bins[1024, 2048]["responses"]] == [4, 8]
    assert bins[512, 1024]["accuracy"]["value"] == pytest.approx(3 / 4)
    assert bins[1024, 2048]["accuracy"]["value"] == pytest.approx(2 / 8)
    assert result["amc23"]["avg"] == {"value": 1.0, "low": None, "high": None}
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert evaluate(records()[::-1])["aime24"]["avg"]["value"] == pytest.approx(aime["avg"]["value"])


def test_records_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    good = {"data_source": "s", "problem_id": 3, "response_length": 7, "score": 1, "more": "ignored"}
    path.write_text(json.dumps(good) + "\n\n" + json.dumps(good | {"score": 1.1, "acc": 0.5}) + "\n")
    assert read_records(path) == [Record("s", "3", 7, 1.0), Record("s", "3", 7, 0.5)]
    for line, says in (
        (json.dumps(good | {"score": 2}), "score=2"),
        (json.dumps(good | {"score": None}), "'score'"),
        *((json.dumps(good | {"response_length": n}), f"response_length={n}.*from 0") for n in (-1, 1.5)),
        ('{"score": 1}', "'data_source'"),
        ("{", "Expecting"),
    ):
        path.write_text(f"{json.dumps(good)}\n{line}\n")
        with pytest.raises(ValueError, match=rf"records\.jsonl\W+(line )?2\b.*{says}"):
            read_records(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match=str(path)):
        read_records(path)


def test_the_newest_generations_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "validation").mkdir()
    lines = "".join(json.dumps(asdict(record)) + "\n" for record in records())
    (tmp_path / "validation/3.jsonl").write_text(lines, encoding="utf-8")
    table = unpadded(conclude_evaluation(tmp_path, 0))
    assert "| aime24 | 4 | 4 | 43.8% [" in table and "| aime24 | 1024 to 1900 | 8 | 25.0% [" in table
    assert "| amc23 | 1 | 1 | 100.0% | 100.0% |  |  |" in table
    assert json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8")) == evaluate(records())
    assert main([str(tmp_path / "validation/3.jsonl")]) == 0
    assert unpadded(capsys.readouterr().out) == table.partition("\ngenerations: ")[0]
    assert main([str(tmp_path / "none.jsonl")]) == 2 and "none.jsonl" in capsys.readouterr().err
