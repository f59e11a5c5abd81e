"""Promises 18, 19 and 20: answers are judged, data sets are verl's, accuracies have their intervals."""

from __future__ import annotations

import itertools
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run

from recipe.math.evaluation import pass_at_k
from recipe.math.reward import compute_score

pytestmark = pytest.mark.promise(18, 19, 20)


def score(response: str, truth: str) -> float:
    return float(compute_score("of/tests", response, truth, time_limit_s=10)["score"])


#: truth, right answers, wrong ones: what models write that were asked for a box.
ANSWERS: list[tuple[str, list[str], list[str]]] = [
    ("34", [r"\boxed{34}", r"**34** $$\boxed{34}$$", r"\boxed{x = 34}", r"\boxed{34.0}"],
     [r"\boxed{43}", r"\boxed{-34}", r"\boxed{34.5}", r"\boxed{}", "34 is not it", r"\boxed{34, 35}"]),
    (r"\frac{14}{3}", [r"\boxed{\dfrac{14}{3}}", r"\boxed{14/3}", r"\boxed{\frac{28}{6}}", r"\boxed{\tfrac{14}3}"],
     [r"\boxed{\frac{3}{14}}", r"\boxed{4.67}", r"\boxed{\frac{14}{33}}", r"\boxed{-\frac{14}{3}}"]),
    (r"\left( 3, \frac{\pi}{2} \right)", [r"\boxed{(3, \pi/2)}", r"\boxed{\left(3,\frac{\pi}{2}\right)}"],
     [r"\boxed{(3, \pi/3)}", r"\boxed{(\pi/2, 3)}", r"\boxed{3}"]),
    ("p - q", [r"\boxed{p-q}", r"\boxed{-q+p}"], [r"\boxed{q-p}", r"\boxed{p}", r"\boxed{p+q}"]),
    (r"\sqrt{51}", [r"\boxed{\sqrt{51}}", r"\boxed{\sqrt{3}\sqrt{17}}"], [r"\boxed{7.14}", r"\boxed{51}"]),
    ("6000", [r"\boxed{6,000}", r"\boxed{\$6000}", r"\boxed{6000\text{ dollars}}", r"\boxed{6{,}000}"],
     [r"\boxed{600}", r"\boxed{60000}", r"\boxed{6\text{ thousand or more}}"]),
    ("2", [r"First \boxed{5}, corrected: \boxed{2}", r"I get 3 or \boxed{5}. No. Final: \boxed{2}."],
     [r"\boxed{2} was wrong: \boxed{5}", r"<think> \boxed{2} </think> \boxed{7}"]),
    (r"x^2+2x+1", [r"\boxed{(x+1)^2}", r"\boxed{x^2 + 2x + 1}"], [r"\boxed{(x-1)^2}", r"\boxed{x^2+2x}"]),
    ("[1, 3)", [r"\boxed{[1,3)}"], [r"\boxed{(1,3)}", r"\boxed{[1,3]}", r"\boxed{1}"]),
    ("1, 2", [r"\boxed{1, 2}", r"\boxed{2,1}"], [r"\boxed{1}", r"\boxed{1,2,3}", r"\boxed{12}"]),
    ("B", [r"\boxed{B}", r"\boxed{(B)}", r"\boxed{\text{B}}", "All the same. #### B"], [r"\boxed{A}", r"\boxed{AB}"]),
    ("0.333", [r"\boxed{0.333}"], [r"\boxed{\frac13}", r"\boxed{0.33}"]),
    ("0", [r"\boxed{0}", r"\boxed{0.0}"], [r"\boxed{10^{-12}}", r"\boxed{0.0001}", r"\boxed{1}"]),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "right", "wrong"), ANSWERS, ids=[truth for truth, *_ in ANSWERS])
def test_realistic_answers_are_judged(truth: str, right: list[str], wrong: list[str]) -> None:
    assert [answer for answer in right if score(answer, truth) != 1] == []
    assert [answer for answer in wrong if score(answer, truth) != 0] == []


def test_realistic_answers_have_a_status_and_their_accuracy() -> None:
    told = compute_score("of/tests", r"\boxed{34}", "34", {"index": 5})
    assert (told["score"], told["acc"]) == (1, 1) and told["problem_id"].endswith("5")
    assert compute_score("of/tests", "no answer", "34")["status"] != told["status"]


#: Texts from which a policy would learn that no answer is needed.
ATTEMPTS = {
    "a value before an empty box": (r"So we have $204$ in all. \boxed{}", "204"),
    "the last number of prose": ("We have 3 apples and 42 pears", "42"),
    "every candidate": (r"\boxed{1} \boxed{2} \boxed{3} \boxed{4}", "3"),
    "a list of candidates": (r"\boxed{56, 57, 58, 59}", "58"),
    "more or less": (r"\boxed{58 \text{ or } 59}", "58"),
    "a bound": (r"\boxed{x \geq 58}", "58"),
    "both signs": (r"\boxed{\pm 3}", "3"),
    "the problem again": ("Find x if 2x = 116. Let us think. x is what is asked for.", "58"),
    "a thought that never ends": (r"<think> it may be \boxed{58}", "58"),
    "an answer in a denied sentence": ("The answer is not 58", "58"),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_earns_nothing(name: str) -> None:
    assert score(*ATTEMPTS[name]) == 0


HOSTILE = [
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{" + "(" * 5000 + "x" + ")" * 5000 + "}",
    r"\boxed{\int_0^1 x^x \sin(e^{x^2}) dx}",
    r"\boxed{" + "9" * 200_000 + "}",
    r"\boxed{\prod_{k=1}^{99999} (1+\frac{1}{k^2})}",
    r"\boxed{__import__('os').system('touch made_by_an_answer')}",
    "\\boxed{" * 50_000,
    r"\boxed{10000000!}",
]


def test_hostile_answers_cost_no_other_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From many threads, as verl's reward workers ask; one that is not bounded would never end."""
    monkeypatch.chdir(tmp_path)
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


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_columns_of_one_s_own_become_rows_of_verl_s(kind: str, tmp_path: Path) -> None:
    rows = [*problems(6), problems(1)[0]]  # the last is there twice
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    else:
        (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("prepare", f"mine.{kind}", "--prompt", "question", "--answer", "result", "--out", "out")
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
            expected = 1 - math.comb(n - correct, k) / math.comb(n, k)
            assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-12)
            if n <= 5:
                draws = list(itertools.combinations(answers, k))
                assert pass_at_k(n, correct, k) == pytest.approx(sum(map(max, draws)) / len(draws))


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
    numbers = [float(number) for number in re.findall(r"([\d.]+)%", ended.out)]
    assert numbers[0] == pytest.approx(43.75, abs=0.06) and 75.0 in numbers, "avg@4 and pass@4"
    low, high = map(float, re.findall(r"43\.8% \[([\d.]+)%?, ([\d.]+)%?\]", ended.out)[0])
    assert 0 <= low < 43.75 < high <= 100 and high - low > 20, "four problems say little"
    ended = run("recipe.math.evaluation", "none.jsonl", folder=tmp_path)
    assert ended.status == 2 and "none.jsonl" in ended.error
