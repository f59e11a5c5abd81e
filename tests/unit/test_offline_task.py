"""The embedded offline task: well-formed, seeded, disjoint, with lengths of its own shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import holds

from recipe.math.data import offline_task
from recipe.math.data.offline_task import (
    MAX_DIVIDEND,
    MAX_QUOTIENT,
    VOCABULARY,
    Division,
    generate,
    score_answer,
    write_dataset,
)


@settings(max_examples=200)
@given(divisor=st.integers(1, 99), quotient=st.integers(1, 40), rest=st.integers(0, 98))
def test_the_working_ends_in_the_remainder(divisor: int, quotient: int, rest: int) -> None:
    problem = Division(quotient * divisor + rest % divisor, divisor)
    assert int(problem.answer) == problem.dividend % divisor
    assert score_answer(problem.working, problem.answer) == 1.0
    assert set(problem.working + problem.question) <= set(VOCABULARY)
    assert len(problem.working) == 7 * quotient - 4 or problem.dividend > MAX_DIVIDEND
    cut = problem.working.rpartition("-")[0]  # without the last subtraction
    assert score_answer(cut, problem.answer) == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("106-44=062-44=018", "18", 1.0),
        (" 18 ", "18", 1.0),
        ("106-44=062", "18", 0.0),
        ("106-44=062-44=018-44=", "18", 0.0),
        ("", "18", 0.0),
        ("18.0", "18", 0.0),
        ("-18", "18", 0.0),
        ("١٨", "18", 0.0),  # digits, but not ASCII
        ("9" * 10_000, "18", 0.0),
        ("044-44=000", "0", 1.0),
        ("", "0", 0.0),
    ],
)
def test_scores(text: str, truth: str, score: float) -> None:
    assert score_answer(text, truth) == score


def test_a_broken_truth_is_refused() -> None:
    with pytest.raises(ValueError, match="ground_truth"):
        score_answer("18", "eighteen")


def test_generation_is_seeded_and_disjoint() -> None:
    train, test = generate(2000, 300, seed=7)
    assert (train, test) == generate(2000, 300, seed=7)
    assert test == generate(10, 300, seed=7)[1]  # the size of one split does not change the other
    assert train != generate(2000, 300, seed=8)[0]
    assert len(set(train)) == 2000 and len(set(test)) == 300
    other_test = generate(0, 300, seed=8)[1]
    assert not {problem.split_key for problem in train} & {problem.split_key for problem in [*test, *other_test]}


def test_more_problems_than_there_are_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    few = generate(5, 5, seed=0)
    monkeypatch.setattr(offline_task, "draw", lambda rng: [*few[0], *few[1]][rng.integers(10)])
    assert set(generate(5, 0, seed=0)[0]) == set(few[0])
    with pytest.raises(ValueError, match=holds("n_train=6", "5 ")):
        generate(6, 0, seed=0)


def test_lengths_span_two_orders_of_magnitude() -> None:
    lengths = np.array([len(problem.working) for problem in generate(4000, 0, seed=0)[0]])
    assert lengths.min() == 3 and lengths.max() == 7 * MAX_QUOTIENT - 4
    assert np.quantile(lengths, 0.9) > 20 * np.quantile(lengths, 0.1)


def test_only_a_file_of_our_own_is_replaced(tmp_path: Path) -> None:
    write_dataset(tmp_path, n_train=20, n_test=10, seed=0)
    before = (tmp_path / "test.parquet").stat().st_mtime_ns
    write_dataset(tmp_path, n_train=30, n_test=10, seed=0)
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 30
    assert (tmp_path / "test.parquet").stat().st_mtime_ns == before  # the same problems: left as it is
    pq.write_table(pa.table({"mine": [1]}), tmp_path / "train.parquet")
    mine = (tmp_path / "train.parquet").read_bytes()
    with pytest.raises(FileExistsError, match=r"train\.parquet"):
        write_dataset(tmp_path, n_train=20, n_test=10, seed=0)
    assert (tmp_path / "train.parquet").read_bytes() == mine
