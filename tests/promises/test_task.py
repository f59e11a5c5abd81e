"""Promises 18, 19 and 20: answers are judged, data sets are verl's, accuracies have their intervals."""

from __future__ import annotations

import functools
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run

from benchmarks.rewards import SETS, read_pairs
from recipe.math.evaluation import pass_at_k
from recipe.math.reward import compute_score

pytestmark = pytest.mark.promise(18, 19, 20)


def score(response: str, truth: str, **limits: float) -> float:
    return float(compute_score("of/tests", response, truth, **limits)["score"])


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_labelled_answers_are_judged_and_no_attempt_earns(path: Path) -> None:
    """An attempt is a text from which a policy would learn that no answer is needed."""
    responses, truths, right = zip(*read_pairs(path), strict=True)
    with ThreadPoolExecutor(8) as threads:
        scores = threads.map(functools.partial(score, time_limit_s=20.0), responses, truths)
    unlike = [case for case in zip(responses, truths, right, scores, strict=True) if case[2] != case[3]]
    assert len(responses) > 100 and unlike == []


HOSTILE = [
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{" + "(" * 5000 + "x" + ")" * 5000 + "}",
    r"\boxed{\int_0^1 x^x \sin(e^{x^2}) dx}",
    r"\boxed{" + "9" * 200_000 + "}",
    r"\boxed{\prod_{k=1}^{99999} (1+\frac{1}{k^2})}",
    r"\boxed{__import__('os').system('touch made_by_an_answer')}",
    "\\boxed{" * 50_000,
    r"\boxed{10000000!}",
    "<answer>" + "\n" * 900_000,
]


def test_hostile_answers_cost_no_other_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From many threads, as verl's reward workers ask; one that is not bounded would never end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recipe.math.answers.extraction.MAX_RESPONSE_CHARS", 1_000_000)
    asked = [*itertools.chain(*[(hostile, rf"\boxed{{x+{i}}}") for i, hostile in enumerate(HOSTILE)])]
    truths = [*itertools.chain(*[("34", f"{i}+x") for i in range(len(HOSTILE))])]
    with ThreadPoolExecutor(8) as threads:
        scores = list(threads.map(score, asked, truths))
    assert scores == [0.0, 1.0] * len(HOSTILE) and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- 19: data


def problems(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"question": f"A farmer number {i} has {i} cows and buys {i + 1} more of them. How many are there now in all?",
         "result": str(2 * i + 1)}
        for i in range(first, first + count)
    ]  # fmt: skip


def test_columns_of_one_s_own_become_rows_of_verl_s(tmp_path: Path) -> None:
    rows = [*problems(6), problems(1)[0]]  # the last is there twice
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    words = ("prepare", "mine.parquet", "--prompt", "question", "--answer", "result", "--out", "out")
    ended = run("recipe.math.data", *words, folder=tmp_path)
    assert ended.status == 0, ended.error
    written = pq.read_table(tmp_path / "out/mine.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in written] == [row["result"] for row in rows[:6]]
    for row, given in zip(written, rows, strict=False):
        (message,) = row["prompt"]
        assert message["role"] == "user" and given["question"] in message["content"] and "box" in message["content"]
        assert row["data_source"] == "mine" and score(rf"\boxed{{{given['result']}}}", given["result"]) == 1
    manifest = json.loads((tmp_path / "out/mine.manifest.json").read_text())
    assert manifest["rows"] == 6


def test_problems_of_a_test_set_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "copies/math500").mkdir(parents=True)
    test = {"problem": problems(1)[0]["question"], "solution": r"\boxed{1}", "answer": "1", "subject": "Algebra",
            "level": 1, "unique_id": "test/a/1.json"}  # fmt: skip
    (tmp_path / "copies/math500/test.jsonl").write_text(json.dumps(test) + "\n")
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems(5)))
    words = ("prepare", "mine.jsonl", "--prompt", "question", "--answer", "result", "--out", "out")
    ended = run("recipe.math.data", *words, "--source", "copies", "--against", "math500", folder=tmp_path)
    assert ended.status == 0, ended.error
    rows = pq.read_table(tmp_path / "out/mine.parquet").to_pylist()
    assert "1" not in [row["reward_model"]["ground_truth"] for row in rows]


# ---------------------------------------------------------------- 20: evaluation


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int) -> None:
    for correct in range(n + 1):
        answers = [1] * correct + [0] * (n - correct)
        for k in {1, 2, n} & set(range(1, n + 1)):
            draws = list(itertools.combinations(answers, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(max, draws)) / len(draws), abs=1e-12)


def test_the_command_prints_accuracy_with_its_interval(tmp_path: Path) -> None:
    scores = {"a": [1, 1, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 1, 1], "d": [0, 1, 0, 0]}
    lines = [
        {"data_source": "aime24", "problem_id": name, "response_length": 100 + 600 * j, "score": value}
        for name, values in scores.items()
        for j, value in enumerate(values)
    ]
    (tmp_path / "dump.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = run("recipe.math.evaluation", "dump.jsonl", folder=tmp_path)
    assert ended.status == 0, ended.error
    assert " 75.0% [" in ended.out, "pass@4"
    low, high = map(float, re.findall(r"43\.8% \[([\d.]+)%?, ([\d.]+)%?\]", ended.out)[0])
    assert 0 <= low < 43.75 < high <= 100 and high - low > 20, "four problems say little"
    ended = run("recipe.math.evaluation", "none.jsonl", folder=tmp_path)
    assert ended.status == 2 and "none.jsonl" in ended.error
