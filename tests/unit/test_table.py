"""The table of responses survives kills at any point, replaces steps done again, and joins ranks."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import fspo.table
from fspo.table import FOLDER, SCHEMA, TableWriter, join_rows, read_table

META = {"loss": "fspo", "rule": "known", "precision": "fp32"}


def rows(step: int, update: int = 0, count: int = 3, rank: int = 0) -> dict[str, Any]:
    """Rows that say where they belong: A is 1000 times the step, plus the update."""
    length_B = np.arange(1, count + 1)
    return {
        **{"step": step, "update": update, "minibatch": update, "row": np.arange(count) + rank * count},
        **{"S": 0.1 * length_B, "L": length_B, "A": np.full(count, 1000.0 * step + update), "inside": 1.0},
        **{"truncated": length_B > 2, "prompt": np.array([f"p{i % 2}" for i in range(count)], object)},
    }


def writer(folder: Path, run: str = "a", **options: Any) -> TableWriter:
    return TableWriter(folder, META, **{"run": run, **options})


def counts(folder: Path, **options: Any) -> dict[tuple[int, int], int]:
    """Rows of each (step, update), all of which must be as they were written, for read_table and for pandas."""
    columns = read_table(folder, **options).columns
    if not columns:
        return {}
    np.testing.assert_array_equal(columns["A"], 1000.0 * columns["step"] + columns["update"])
    keys, numbers = np.unique(np.stack([columns["step"], columns["update"]]), axis=1, return_counts=True)
    return dict(zip(zip(*keys.tolist(), strict=True), numbers.tolist(), strict=True))


def test_what_was_written_is_read_back_by_read_table_and_pandas(tmp_path: Path) -> None:
    table = writer(tmp_path / FOLDER)
    for step in range(1, 4):
        for update in range(2):
            assert not table.append(rows(step, update) | {"truncated": np.array([0, 1, np.nan])})
    table.sync()
    read = read_table(tmp_path)  # a run folder
    assert (len(read), read.left_out, read.problems, read.last) == (18, 0, [], (3, 1))
    assert (read.run, read.others, read.ranks, read.expected, read.meta["loss"]) == ("a", [], [0], 1, "fspo")
    np.testing.assert_allclose(read.columns["S"][:3], [0.1, 0.2, 0.3], rtol=1e-6)
    np.testing.assert_array_equal(read.columns["truncated"][:3], [0, 1, np.nan])
    assert read.columns["prompt"][:3].tolist() == [0, 1, 0] and np.isnan(read.columns["weight"]).all()
    frame = pd.read_parquet(tmp_path / FOLDER)
    assert len(frame) == 18 and list(frame.columns) == list(read.columns) == SCHEMA.names
    newer = read_table(tmp_path, columns=["inside"], after=(2, 0))
    assert set(newer.columns) == {"step", "update", "S", "A", "inside"} and len(newer) == 9


#: Appends until it is killed, at a call of os.replace or os.unlink too. It says what it has appended.
CHILD = """
import os, random, sys
from pathlib import Path
import fspo.table
from test_table import rows, writer

folder, first, dies, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
fspo.table._FILE_ROWS = 12
half = random.Random(seed).random() < 0.5

def counted(function, calls=[0]):
    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == dies:
            try:
                if half:
                    function(*args, **kwargs)
            finally:
                os._exit(9)
        return function(*args, **kwargs)
    return call

os.replace, os.unlink = counted(os.replace), counted(os.unlink)
table = writer(folder, first_step=first)
for step in range(first, first + 200):
    for update in range(2):
        table.append(rows(step, update, 1 + (step + update) % 4))
        print(step, update, flush=True)
"""


def test_a_kill_at_any_point_and_a_resume_leave_each_row_once(tmp_path: Path) -> None:
    """A start that goes back to step k keeps the rows before k as they were, and drops those from k on."""
    draws = random.Random(1)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    step, kept = 1, dict[tuple[int, int], int]()
    for start in range(12):
        dies = draws.choice([1, 2, 3, draws.randint(4, 60)])
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(step), str(dies), str(start)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert child.returncode == 9, child.stderr
        said = [tuple(map(int, line.split())) for line in child.stdout.splitlines()]
        expected = kept | {(s, u): 1 + (s + u) % 4 for s, u in said}
        now = counts(tmp_path)
        # One more may have been written and not said; a start that was killed while it went back has dropped less.
        beyond = now.keys() - expected.keys()
        assert expected.items() <= now.items() and (len(beyond) <= 1 or not said)
        step = max(1, max((s for s, _ in now), default=1) - draws.randint(0, 2))
        kept = {key: number for key, number in now.items() if key[0] < step}
    writer(tmp_path, first_step=step)
    assert counts(tmp_path) == kept and len(pd.read_parquet(tmp_path)) == sum(kept.values())


class Tables(RuleBasedStateMachine):
    """Two ranks append in turn, fall behind, are opened again and go back, beside a plain list of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.written: list[dict[tuple[int, int], int]] = [{}, {}]
        self.writers = [writer(self.folder, rank=rank, ranks=2) for rank in range(2)]
        self.first_step = [0, 0]

    @rule(rank=st.integers(0, 1), count=st.integers(0, 5), new_step=st.booleans())
    def append(self, rank: int, count: int, new_step: bool) -> None:
        step, update = max(self.written[rank], default=(0, -1))
        place = max((step + 1, 0) if new_step else (step, update + 1), (self.first_step[rank], 0))
        self.writers[rank].append(rows(*place, count, rank))
        self.written[rank][place] = count

    @rule(rank=st.integers(0, 1), back=st.integers(0, 3))
    def do_a_step_again(self, rank: int, back: int) -> None:
        step = max(max(self.written[rank], default=(0, 0))[0] - back, self.first_step[rank])
        again = any(place[0] >= step for place in self.written[rank])
        assert self.writers[rank].append(rows(step, 0, 2, rank)) is again
        self.written[rank] = {k: n for k, n in self.written[rank].items() if k[0] < step} | {(step, 0): 2}

    @rule(rank=st.integers(0, 1), back=st.integers(0, 3))
    def resume(self, rank: int, back: int) -> None:
        step = max(max(self.written[rank], default=(0, 0))[0] - back, 0)
        self.writers[rank] = writer(self.folder, rank=rank, ranks=2, first_step=step)
        self.first_step[rank] = step
        self.written[rank] = {k: n for k, n in self.written[rank].items() if k[0] < step}

    @invariant()
    def what_both_ranks_have_is_there_once(self) -> None:
        if not all(self.written):
            return
        last = min(max(one) for one in self.written)
        keys = {key for one in self.written for key in one if key <= last}
        expected = {key: n for key in keys if (n := sum(one.get(key, 0) for one in self.written))}
        assert counts(self.folder) == expected

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows fill a file."""
    monkeypatch.setattr(fspo.table, "_FILE_ROWS", 12)


def test_ranks_are_joined_by_row_and_one_that_lags_is_named(tmp_path: Path) -> None:
    tables = [writer(tmp_path, rank=rank, ranks=8) for rank in range(8)]
    for step in (1, 2):
        for rank in reversed(range(8)):
            tables[rank].append(rows(step, rank=rank))
    for table in tables[:7]:
        table.append(rows(3))
    read = read_table(tmp_path)
    assert read.columns["row"].tolist() == [*range(24), *range(24)] and not read.problems  # the last may be running
    for table in tables[:7]:
        table.append(rows(4))
    read = read_table(tmp_path)
    assert len(read) == 48 and len(read.problems) == 1 and "rank 7" in read.problems[0]
    for path in tmp_path.glob("*-00007-*"):
        path.unlink()
    read = read_table(tmp_path)
    assert len(read) == 4 * 21 and "7 wrote nothing" in read.problems[0]


def test_responses_without_S_are_counted_but_for_skipped_ones(tmp_path: Path) -> None:
    for meta, left_out in (({}, 2), ({"without_S": "A = 0"}, 1)):
        folder = tmp_path / str(left_out)
        table = TableWriter(folder, META | meta, run="a")
        table.append(rows(1) | {"S": np.array([0.1, np.nan, np.nan]), "A": np.array([1.0, 0.0, 1.0])})
        read = read_table(folder)
        assert (len(read), read.left_out) == (1, left_out) and pd.read_parquet(folder)["S"].isna().sum() == 2


def test_other_starts_are_left_alone_and_named(tmp_path: Path) -> None:
    for run, count in (("older", 2), ("newer", 4)):
        writer(tmp_path, run).append(rows(1, count=count))
        for path in tmp_path.glob("*older*"):
            os.utime(path, (1, 1))
    read = read_table(tmp_path)
    assert (read.run, read.others, len(read)) == ("newer", ["older"], 4)
    assert len(read_table(tmp_path, run="older")) == 2
    assert "older" in read_table(tmp_path, run="none").problems[0]


def test_a_damaged_file_is_named_and_set_aside_by_a_resume(tmp_path: Path) -> None:
    table = writer(tmp_path)
    for step in range(1, 9):
        table.append(rows(step))
    newest = max(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:-50])
    read = read_table(tmp_path)
    assert read.columns["step"].max() == 4 and newest.name in read.problems[0]
    table = writer(tmp_path, first_step=9)
    table.append(rows(9))
    assert sorted(counts(tmp_path)) == [*((step, 0) for step in range(1, 5)), (9, 0)]
    assert newest.with_name(f"{newest.name}.damaged").exists() and not read_table(tmp_path).problems


def test_a_disk_without_room_leaves_the_table_as_it_was(tmp_path: Path) -> None:
    table = writer(tmp_path)
    table.append(rows(1))
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError):
            table.append(rows(2, count=3000) | {"S": np.random.default_rng(0).normal(size=3000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert counts(tmp_path) == {(1, 0): 3} and len(list(tmp_path.iterdir())) == 1
    table.append(rows(2))
    assert counts(tmp_path) == {(1, 0): 3, (2, 0): 3}


def test_two_writers_of_one_rank_do_not_lose_rows_in_silence(tmp_path: Path) -> None:
    first, second = writer(tmp_path), writer(tmp_path)
    first.append(rows(1))
    second.append(rows(1))
    with pytest.raises(OSError, match="rank="):
        first.append(rows(2))


def test_what_is_no_row_or_run_is_refused(tmp_path: Path) -> None:
    table = writer(tmp_path)
    with pytest.raises(KeyError, match="colour"):
        table.append(rows(1) | {"colour": 1})
    with pytest.raises(ValueError, match="a/b"):
        writer(tmp_path, "a/b")
    assert not list(tmp_path.iterdir())


def test_rows_with_different_columns_are_joined() -> None:
    joined = join_rows([{"S": np.zeros(1), "row": np.array([4])}, {"S": np.ones(1), "prompt": np.array(["a"], object)}])
    assert joined["row"].tolist() == [4, -1] and joined["prompt"].tolist() == [None, "a"]
