"""The table of responses survives kills at any point, replaces steps done again, and joins ranks.

tests/promises/test_rows.py kills processes and damages files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from table_rows import numbers, rows, writer

import fspo.table
from fspo.table import FOLDER, TableWriter, join_rows, read_table

Place = tuple[int, int]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows fill a file."""
    monkeypatch.setattr(fspo.table, "_FILE_ROWS", 6)


class Killed(BaseException):
    """Nothing cleans up after it: files can neither be renamed nor removed any more."""


def dying(function: Any, left: list[int], half: bool) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and half:
            function(*args, **options)
        if left[0] <= 0:
            raise Killed
        return function(*args, **options)

    return call


class Tables(RuleBasedStateMachine):
    """Two ranks append in turn, fall behind, are killed, opened again and go back, beside a list of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.written: list[dict[Place, int]] = [{}, {}]
        self.writers = [writer(self.folder, rank=rank, ranks=2) for rank in range(2)]
        self.first_step = [0, 0]

    def last(self, rank: int) -> Place:
        return max(self.written[rank], default=(0, -1))

    def before(self, rank: int, step: int) -> dict[Place, int]:
        return {place: count for place, count in self.written[rank].items() if place[0] < step}

    def there(self, rank: int) -> Counter[Place]:
        files = self.folder.glob(f"responses-a-0000{rank}-*.parquet")
        return sum((numbers(pq.ParquetFile(file).read(["step", "update", "A"])) for file in files), Counter())

    @rule(rank=st.integers(0, 1), count=st.integers(0, 5), new_step=st.booleans())
    def append(self, rank: int, count: int, new_step: bool) -> None:
        step, update = self.last(rank)
        place = max((step + 1, 0) if new_step else (step, update + 1), (self.first_step[rank], 0))
        self.writers[rank].append(rows(*place, count, rank))
        self.written[rank][place] = count

    @rule(rank=st.integers(0, 1), back=st.integers(0, 3))
    def do_a_step_again(self, rank: int, back: int) -> None:
        step = max(self.last(rank)[0] - back, self.first_step[rank])
        again = any(place[0] >= step for place in self.written[rank])
        assert self.writers[rank].append(rows(step, 0, 2, rank)) is again
        self.written[rank] = self.before(rank, step) | {(step, 0): 2}

    @rule(rank=st.integers(0, 1), back=st.integers(0, 3))
    def resume(self, rank: int, back: int) -> None:
        step = max(self.last(rank)[0] - back, 0)
        self.writers[rank] = writer(self.folder, rank=rank, ranks=2, first_step=step)
        self.first_step[rank], self.written[rank] = step, self.before(rank, step)

    @rule(rank=st.integers(0, 1), back=st.integers(-1, 3), calls=st.integers(0, 4), half=st.booleans())
    def die(self, rank: int, back: int, calls: int, half: bool) -> None:
        """While a mini-batch is appended or a step is done again, before or after a file is renamed or removed."""
        before, place = self.written[rank], (max(self.last(rank)[0] - back, self.first_step[rank]), 0)
        left = [calls]
        with pytest.MonkeyPatch.context() as patch:
            for name in ("replace", "unlink"):
                patch.setattr(os, name, dying(getattr(os, name), left, half))
            with contextlib.suppress(Killed):
                self.writers[rank].append(rows(*place, 2, rank))
        now = self.there(rank)
        before, kept = ({p: n for p, n in one.items() if n} for one in (before, self.before(rank, place[0])))
        assert kept.items() <= now.items() <= {*before.items(), (place, 2)}, "each row is there once, and as it was"
        missing = [p for p in before if p not in now]
        assert place in now or not missing or min(missing) > max(now, default=(-1, 0)), "a beginning of what there was"
        self.written[rank] = now
        self.resume(rank, 0)

    @invariant()
    def what_was_written_is_there_once(self) -> None:
        """In the files of each rank, and of both as far as the one that lags has come."""
        each = [Counter(written) for written in self.written]
        assert [self.there(rank) for rank in range(2)] == each, "a Counter takes what is missing for 0"
        if all(self.written):
            read = read_table(self.folder)
            assert read.last is not None and read.last >= min(map(self.last, (0, 1)))
            both = {place: count for place, count in (each[0] + each[1]).items() if place <= read.last}
            assert numbers(read.columns) == both

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def test_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    writer(tmp_path / FOLDER).append(rows(1) | {"truncated": np.array([0, 1, np.nan])})
    columns = read_table(tmp_path, columns=["truncated", "prompt"]).columns  # of a run folder
    assert set(columns) == {"step", "update", "S", "A", "truncated", "prompt"}
    np.testing.assert_array_equal(columns["truncated"], [0, 1, np.nan])
    assert columns["prompt"].tolist() == [0, 1, 0]


def test_responses_without_S_are_counted_but_for_skipped_ones(tmp_path: Path) -> None:
    known = {"loss": "fspo", "rule": "known"}
    for meta, left_out in ((known, 2), (known | {"without_S": "A = 0"}, 1)):
        folder = tmp_path / str(left_out)
        table = TableWriter(folder, meta, run="a")
        table.append(rows(1) | {"S": np.array([0.1, np.nan, np.nan]), "A": np.array([1.0, 0.0, 1.0])})
        read = read_table(folder)
        assert (len(read), read.left_out) == (1, left_out) and pd.read_parquet(folder)["S"].isna().sum() == 2


def test_what_is_no_row_or_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="colour"):
        writer(tmp_path).append(rows(1) | {"colour": 1})
    with pytest.raises(ValueError, match="a/b"):
        writer(tmp_path, run="a/b")
    for step in (-1, 10**9):  # which the names of files have no place for
        with pytest.raises(ValueError, match=f"step={step}"):
            writer(tmp_path).append(rows(step))
    assert not list(tmp_path.iterdir())


def test_rows_with_different_columns_are_joined() -> None:
    joined = join_rows([{"S": np.zeros(1), "row": np.array([4])}, {"S": np.ones(1), "prompt": np.array(["a"], object)}])
    assert joined["row"].tolist() == [4, -1] and joined["prompt"].tolist() == [None, "a"]
