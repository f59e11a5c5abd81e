"""avg@k, pass@k and their intervals, beside what tests/promises/test_task.py holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from messages import unpadded
from scipy.stats import binomtest

from recipe.math.evaluation import Record, conclude_evaluation, evaluate, pass_at_k, read_records, share


def records() -> list[Record]:
    scores = {"a": [1, 1, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 1, 1], "d": [0, 1, 0, 0]}
    return [
        Record("aime24", problem, 100 + 600 * j, float(score))
        for problem, values in scores.items()
        for j, score in enumerate(values)
    ] + [Record("amc23", "x", 5, 1.0)]


def test_a_run_s_generations_are_evaluated_as_by_hand(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scored nothing"):
        conclude_evaluation(tmp_path)
    (tmp_path / "validation").mkdir()
    lines = "".join(json.dumps(record._asdict()) + "\n" for record in records())
    (tmp_path / "validation/3.jsonl").write_text(lines, encoding="utf-8")
    table = unpadded(conclude_evaluation(tmp_path))
    assert "| aime24 | 4 | 4 | 43.8% [" in table and "| aime24 | 1024 to 2047 | 8 | 25.0% [" in table
    assert "| amc23 | 1 | 1 | 100.0% | 100.0% |  |  |" in table
    result = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    aime = result["aime24"]
    assert (aime["problems"], aime["responses"]) == (4, 16)
    assert aime["avg"]["value"] == pytest.approx((0.5 + 0 + 1 + 0.25) / 4)
    assert {k: entry["value"] for k, entry in aime["pass"].items()} == pytest.approx(
        {"1": 7 / 16, "2": (pass_at_k(4, 2, 2) + 1 + pass_at_k(4, 1, 2)) / 4, "4": 3 / 4}
    )
    bins = {(row["low"], row["high"]): (row["responses"], row["accuracy"]["value"]) for row in aime["by_length"]}
    assert bins == {(64, 128): (4, 1 / 2), (512, 1024): (4, 3 / 4), (1024, 2048): (8, 1 / 4)}
    assert result["amc23"]["avg"] == {"value": 1.0, "low": None, "high": None}
    three = evaluate(Record("s", problem, 1, float(i)) for problem in "ab" for i in (0, 0, 1))["s"]
    assert list(three["pass"]) == ["1", "2", "3"]


# 200 trials: 0.95 +- 3 standard errors, and one percent for the bootstrap's own error
@pytest.mark.parametrize(
    ("trials", "low", "high"), [(200, 0.89, 0.99), pytest.param(2000, 0.935, 0.97, marks=pytest.mark.slow)]
)
def test_an_interval_covers_the_truth_as_often_as_it_says(trials: int, low: float, high: float) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(trials):  # 30 problems of a population whose accuracy is 0.4, with 8 responses each
        means = rng.binomial(8, rng.beta(0.6, 0.9, size=30)) / 8
        estimate = share(means, np.ones(30))
        hits += estimate["low"] <= 0.4 <= estimate["high"]
    assert low <= hits / trials <= high


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_problems_of_one_value_have_wilsons_interval(value: float) -> None:
    result = evaluate([Record("s", str(i), 1, value) for i in range(30)])["s"]
    exact = binomtest(int(30 * value), 30).proportion_ci(0.95, "wilson")
    assert (result["avg"]["low"], result["avg"]["high"]) == pytest.approx((exact.low, exact.high))
    assert result["pass"]["1"] == result["avg"] and result["by_length"][0]["accuracy"] == result["avg"]


GOOD = {"data_source": "s", "problem_id": "3", "response_length": 7, "score": 1, "more": "ignored"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (GOOD | {"score": 2}, "score=2"),
        (GOOD | {"response_length": None}, "response_length.*line 3"),
        ("text", "line 3"),
    ],
)
def test_a_line_that_is_no_scored_response_is_named(tmp_path: Path, line: object, says: str) -> None:
    path = tmp_path / "records.jsonl"
    lines = [json.dumps(row) for row in (GOOD, GOOD | {"score": 1.1, "acc": 0.5}, line)]
    path.write_text("\n".join(lines[:2]))
    assert read_records(path) == [Record("s", "3", 7, 1.0), Record("s", "3", 7, 0.5)]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"records\.jsonl.*{says}"):
        read_records(path)
