"""The embedded offline task: well-formed, seeded, disjoint, with lengths of its own shape."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.math.data.offline_task import MAX_QUOTIENT, VOCABULARY, Division, distinct, score_answer, write_dataset


@settings(max_examples=200)
@given(divisor=st.integers(1, 99), quotient=st.integers(1, 9), rest=st.integers(0, 98))
def test_the_working_ends_in_the_remainder(divisor: int, quotient: int, rest: int) -> None:
    problem = Division(quotient * divisor + rest % divisor, divisor)
    assert int(problem.answer) == problem.dividend % divisor
    assert score_answer(problem.working, problem.answer) == 1.0
    assert set(problem.working + problem.question) <= set(VOCABULARY) and len(problem.working) == 7 * quotient - 4
    assert score_answer(problem.working.rpartition("-")[0], problem.answer) == 0.0, "without the last subtraction"


@pytest.mark.parametrize("text", ["106-44=062", "018-44=", "", "18.0", "-18", "١٨", "9" * 10_000])
def test_only_the_last_number_is_the_answer(text: str) -> None:
    assert score_answer(text, "18") == 0.0
    assert score_answer(f"{text}=018 ", "18") == 1.0


def test_problems_are_seeded_and_the_splits_disjoint() -> None:
    train, test = distinct(2000, 7, "train"), distinct(300, 7, "test")
    assert (train, test) == (distinct(2000, 7, "train"), distinct(300, 7, "test"))
    assert train != distinct(2000, 8, "train") and len(set(train)) == 2000

    def endings(problems: list[Division]) -> set[tuple[int, str]]:
        return {(problem.divisor, problem.answer) for problem in problems}

    assert not endings(train) & endings([*test, *distinct(300, 8, "test")])


def test_more_problems_than_there_are_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    few = distinct(5, 0, "train")
    monkeypatch.setattr("recipe.math.data.offline_task.draws", lambda rng, split: itertools.cycle(few))
    assert set(distinct(5, 0, "train")) == set(few)
    with pytest.raises(ValueError, match="n_train=6"):
        distinct(6, 0, "train")


def test_lengths_span_two_orders_of_magnitude() -> None:
    lengths = np.array([len(problem.working) for problem in distinct(4000, 0, "train")])
    assert lengths.min() == 3 and lengths.max() == 7 * MAX_QUOTIENT - 4
    assert np.quantile(lengths, 0.9) > 20 * np.quantile(lengths, 0.1)


def test_only_a_file_of_our_own_is_replaced(tmp_path: Path) -> None:
    for n_train in (20, 30):
        write_dataset(tmp_path, n_train, n_test=10, seed=0)
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 30
    pq.write_table(pa.table({"mine": [1]}), tmp_path / "train.parquet")
    mine = (tmp_path / "train.parquet").read_bytes()
    with pytest.raises(FileExistsError, match=r"train\.parquet"):
        write_dataset(tmp_path, n_train=20, n_test=10, seed=0)
    assert (tmp_path / "train.parquet").read_bytes() == mine
