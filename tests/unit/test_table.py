"""The table of responses survives kills at any point, replaces steps done again, and refuses what cannot be."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fspo.table import COLUMNS, FOLDER, NEEDED, TableWriter, read_table

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
    """Rows of each (step, update), all of which must be as they were written."""
    columns = read_table(folder, **options).columns
    if not columns:
        return {}
    np.testing.assert_array_equal(columns["A"], 1000.0 * columns["step"] + columns["update"])
    keys, numbers = np.unique(np.stack([columns["step"], columns["update"]]), axis=1, return_counts=True)
    return dict(zip(zip(*keys.tolist(), strict=True), numbers.tolist(), strict=True))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read_back_by_read_table_and_by_pandas(tmp_path: Path) -> None:
    table = writer(tmp_path)
    for step in range(1, 4):
        for update in range(2):
            table.append(rows(step, update))
    open_part = read_table(tmp_path)
    table.close()
    closed = read_table(tmp_path)
    for read in (open_part, closed):
        assert (len(read), read.left_out, read.problems, read.meta["loss"]) == (18, 0, [], "fspo")
        assert (read.run, read.others, read.ranks, read.expected) == ("a", [], [0], 1)
        assert read.batches.tolist() == [[1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [3, 1]]
        np.testing.assert_allclose(read.columns["S"][:3], [0.1, 0.2, 0.3], rtol=1e-6)
        assert read.columns["truncated"][:3].tolist() == [0, 0, 1]
        assert read.texts["prompt"][read.columns["prompt"]][:3].tolist() == ["p0", "p1", "p0"]
        assert np.isnan(read.columns["weight"]).all() and set(read.columns) == set(COLUMNS)
    assert not [name for name in names(tmp_path) if name.startswith("_")]
    frame = pd.read_parquet(tmp_path)
    assert len(frame) == 18 and list(frame.columns) == list(COLUMNS)
    few = read_table(tmp_path, columns=["A"])
    assert set(few.columns) == {*NEEDED, "A"}
    newer = read_table(tmp_path, after=(2, 0))
    assert newer.batches.tolist() == [[2, 1], [3, 0], [3, 1]] and len(newer) == 9 and not newer.problems


#: Appends until it is killed, or ends itself in a call of os.replace or os.unlink. It says what it has appended.
CHILD = """
import os, random, sys
from pathlib import Path
from test_table import rows, writer

folder, first, dies, run = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def counted(function, calls=[0]):
    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == dies:
            if random.random() < 0.5:
                function(*args, **kwargs)
            os._exit(9)
        return function(*args, **kwargs)
    return call

if dies:
    os.replace, os.unlink = counted(os.replace), counted(os.unlink)
table = writer(folder, run, first_step=first, part_appends=3)
for step in range(first, first + 200):
    for update in range(2):
        table.append(rows(step, update, 1 + (step + update) % 4))
        print(step, update, flush=True)
"""


def killed(folder: Path, first: int, dies: int, run: str) -> tuple[int, int]:
    """The last (step, update) that a child said it had appended before it was killed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(first), str(dies), run],
        **{"stdout": subprocess.PIPE, "text": True, "env": environment},
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    if not dies:
        time.sleep(random.random() * 0.4)
        child.kill()
    with child:
        lines = [line, *child.stdout]
    whole = [line for line in lines if line.endswith("\n")]
    return tuple(map(int, whole[-1].split())) if whole else (first, -1)  # type: ignore[return-value]


@pytest.mark.parametrize("run_of_start", [lambda start: "run", lambda start: f"start{start}"])
def test_a_kill_at_any_point_and_a_resume_leave_each_row_once(tmp_path: Path, run_of_start: Any) -> None:
    """A start that goes back to step k keeps the rows before k as they were, and drops those from k on."""
    kept: dict[tuple[int, int], int] = {}
    step = 1
    for start in range(9):
        last = killed(tmp_path, step, dies=0 if start % 3 == 0 else random.randint(1, 25), run=run_of_start(start))
        now = counts(tmp_path)
        expected = kept | {
            (s, u): 1 + (s + u) % 4 for s in range(step, last[0] + 1) for u in range(2) if (s, u) <= last
        }
        if last[1] >= 0:  # one more may have been appended and not said
            assert expected.items() <= now.items() and len(now) <= len(expected) + 1
        step = max(1, max((s for s, _ in now), default=1) - random.randint(0, 2))
        kept = {key: number for key, number in now.items() if key[0] < step}
    resumed = writer(tmp_path, run_of_start(99), first_step=step, part_appends=3)
    assert not [name for name in names(tmp_path) if name.startswith("_")]
    assert counts(tmp_path) == kept
    resumed.append(rows(step))
    assert counts(tmp_path) == kept | {(step, 0): 3}
    resumed.close()
    assert len(pd.read_parquet(tmp_path)) == sum(kept.values()) + 3


def test_a_cut_stream_loses_its_last_append_and_says_so(tmp_path: Path) -> None:
    table = writer(tmp_path)
    sizes = []
    for step in range(1, 5):
        table.append(rows(step))
        (path,) = tmp_path.iterdir()
        sizes.append(path.stat().st_size)
    content = path.read_bytes()
    for cut in {
        *range(0, len(content), 997),
        *sizes,
        *(size - 1 for size in sizes),
        *(size + 3 for size in sizes[:-1]),
    }:
        folder = tmp_path / "cut" / str(cut)
        folder.mkdir(parents=True)
        (folder / path.name).write_bytes(content[:cut])
        whole = sum(size <= cut for size in sizes)
        read = read_table(folder)
        assert len(read) == 3 * whole
        if cut in (0, *sizes):
            assert all(path.name not in problem for problem in read.problems)
        else:
            assert any(path.name in problem for problem in read.problems), cut
        again = writer(folder)
        assert (len(again.problems) == 0) == (cut in (0, *sizes))
        assert len(read_table(folder)) == 3 * whole
        again.append(rows(9))
        again.close()
        assert len(read_table(folder)) == 3 * whole + 3


def test_a_step_done_again_replaces_its_rows_and_those_after_it(tmp_path: Path) -> None:
    table = writer(tmp_path, part_appends=4)
    for step in range(1, 30):
        table.append(rows(step, 0))
        table.append(rows(step, 1))
    table.append(rows(7, 0, count=5))
    expected = {(step, update): 3 for step in range(1, 7) for update in range(2)} | {(7, 0): 5}
    assert counts(tmp_path) == expected
    table.append(rows(7, 1))
    table.append(rows(7, 0))  # the same step again, in one process
    expected = expected | {(7, 0): 3}
    assert counts(tmp_path) == expected
    table.close()
    assert len(pd.read_parquet(tmp_path)) == sum(expected.values())
    table.append(rows(0))
    assert counts(tmp_path) == {(0, 0): 3}


def test_many_appends_leave_a_few_dozen_files(tmp_path: Path) -> None:
    table = writer(tmp_path, part_appends=2)
    most = 0
    for step in range(700):
        table.append(rows(step, count=1))
        if step % 100 == 99:
            most = max(most, len(names(tmp_path)))
    table.close()
    assert most <= 1 + 3 * 6  # three of each size
    assert counts(tmp_path) == {(step, 0): 1 for step in range(700)}


def test_the_ranks_of_a_run_are_joined_in_the_order_of_rows(tmp_path: Path) -> None:
    tables = [writer(tmp_path, rank=rank, ranks=64) for rank in range(64)]
    for step in (1, 2):
        for rank in reversed(range(64)):
            tables[rank].append(rows(step, rank=rank))
    for table in tables[:63]:
        table.append(rows(3))
    read = read_table(tmp_path)
    assert (len(read), read.ranks, read.expected) == (2 * 192, list(range(64)), 64)
    assert read.columns["row"].tolist() == [*range(192), *range(192)] and not read.problems  # the last may be running
    for table in tables[:63]:
        table.append(rows(4))
    (problem,) = read_table(tmp_path).problems
    assert "step 3, update 0" in problem and str(tmp_path) in problem
    tables[63].close()
    for path in tmp_path.glob("*-00063-*"):
        path.unlink()
    read = read_table(tmp_path)
    assert len(read) == 4 * 189 and any("63" in problem for problem in read.problems)


def test_a_rank_without_responses_has_seen_the_mini_batch(tmp_path: Path) -> None:
    tables = [writer(tmp_path, rank=rank, ranks=2) for rank in range(2)]
    for step in (1, 2, 3):
        tables[0].append(rows(step))
        tables[1].append({name: np.empty(0) for name in ("S", "L", "A")} | {"step": step, "update": 0, "minibatch": 0})
        if step == 2:
            tables[1].close()
    read = read_table(tmp_path)
    assert (len(read), read.left_out, read.problems) == (9, 0, []) and (read.columns["L"] > 0).all()


def test_responses_without_S_are_counted(tmp_path: Path) -> None:
    table = writer(tmp_path)
    table.append(rows(1) | {"S": np.array([0.1, np.nan, np.nan])})
    read = read_table(tmp_path)
    assert (len(read), read.left_out) == (1, 2)
    table.close()
    assert pd.read_parquet(tmp_path)["S"].isna().sum() == 2


def test_other_starts_are_left_alone_and_named(tmp_path: Path) -> None:
    for run, count in (("older", 2), ("newer", 4)):
        table = writer(tmp_path, run)
        table.append(rows(1, count=count))
        table.close()
        for path in tmp_path.glob("*older*"):
            os.utime(path, (1, 1))
    read = read_table(tmp_path)
    assert (read.run, read.others, len(read)) == ("newer", ["older"], 4)
    assert len(read_table(tmp_path, run="older")) == 2
    read = read_table(tmp_path, run="none")
    assert len(read) == 0 and "none" in read.problems[0] and "older" in read.problems[0]


def test_a_start_with_fewer_ranks_drops_what_the_others_had_written(tmp_path: Path) -> None:
    for run, ranks, first in (("one", 4, 1), ("two", 2, 3)):
        for rank in range(ranks):
            table = writer(tmp_path, run, rank=rank, ranks=ranks, first_step=first)
            for step in range(first, first + 4):
                table.append(rows(step, rank=rank))
            table.close()
    assert counts(tmp_path) == {(1, 0): 12, (2, 0): 12} | {(step, 0): 6 for step in range(3, 7)}


def test_a_folder_is_read_while_it_is_written(tmp_path: Path) -> None:
    """A reader sees a beginning of what was written, and never a row twice, whatever is merged meanwhile."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), "1", "0", "run"], env=environment, stdout=-3)
    reads = 0
    try:
        while child.poll() is None:
            now = counts(tmp_path)
            keys = [(s, u) for s in range(1, 201) for u in range(2)]
            assert now == {(s, u): 1 + (s + u) % 4 for s, u in keys[: len(now)]}
            reads += 1
    finally:
        child.kill()
        child.wait()
    assert reads > 3 and len(counts(tmp_path)) == 400


def test_an_append_that_fails_leaves_the_table_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = writer(tmp_path)
    table.append(rows(1))
    write = os.write

    def full(descriptor: int, content: Any) -> int:
        if len(content) > 100:
            return write(descriptor, content[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            table.append(rows(2))
    assert counts(tmp_path) == {(1, 0): 3}
    table.append(rows(2))
    assert counts(tmp_path) == {(1, 0): 3, (2, 0): 3} and not read_table(tmp_path).problems


@pytest.mark.parametrize(
    "change, names_in_message",
    [
        ({"colour": 1}, ["colour"]),
        ({"A": np.zeros(4)}, ["3", "4"]),
        ({"step": np.array([2, 1, 1])}, ["step"]),
        ({"S": None}, ["S"]),
    ],
)
def test_an_append_of_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any], names_in_message: list[str]
) -> None:
    table = writer(tmp_path)
    wrong = {name: value for name, value in (rows(1) | change).items() if value is not None}
    with pytest.raises(ValueError) as error:
        table.append(wrong)
    assert all(name in str(error.value) for name in names_in_message)
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match=r"a/b"):
        writer(tmp_path, "a/b")


def put(folder: Path, columns: dict[str, Any], name: str = "responses-b-00000-000000-000000.parquet") -> Path:
    folder.mkdir(exist_ok=True)
    base = {"step": [1, 1], "update": [0, 0], "minibatch": [1, 1], "S": [0.1, 0.2], "L": [3, 4]}
    meta = {"loss": "x", "rank": "0", "ranks": "1", "rule": "known"}
    table = pa.table({key: value for key, value in (base | columns).items() if value is not None})
    pq.write_table(table.replace_schema_metadata(meta), folder / name)
    return folder / name


@pytest.mark.parametrize(
    "columns, column, left",
    [
        ({"S": [0.1, float("inf")]}, "S", 1),
        ({"S": None}, "S", 0),
        ({"S": ["a", "b"]}, "S", 0),
        ({"S": [[1.0], [2.0]]}, "S", 0),
        ({"L": None}, "L", 0),
        ({"L": [0, 4]}, "L", 1),
        ({"L": [-3, 4]}, "L", 1),
        ({"L": [3.5, 4]}, "L", 1),
        ({"L": [None, 4]}, "L", 1),
        ({"minibatch": [-1, 1]}, "minibatch", 1),
        ({"step": [None, 1]}, "step", 1),
        ({"step": [2**60, 1]}, "step", 1),
        ({"inside": [1.5, 1.0]}, "inside", 1),
        ({"Q_4": [-1.0, 1.0]}, "Q_4", 1),
        ({"A": ["x", "y"]}, "A", 2),
        ({"prompt": [[1], [2]]}, "prompt", 2),
        ({"weight": [float("-inf"), 1.0]}, "weight", 1),
    ],
)
def test_what_cannot_be_is_named_with_file_and_column_and_the_rest_is_used(
    tmp_path: Path, columns: dict[str, Any], column: str, left: int
) -> None:
    path = put(tmp_path / "one", columns)
    read = read_table(tmp_path / "one")
    assert len(read) == left
    assert any(path.name in problem and column in problem for problem in read.problems)
    put(tmp_path / "one", {"step": [2, 2]}, "responses-b-00000-000001-000001.parquet")
    assert len(read_table(tmp_path / "one")) == left + 2


def test_files_that_are_no_table_are_named_and_never_hang(tmp_path: Path) -> None:
    put(tmp_path, {})
    (tmp_path / "responses-b-00000-000001-000001.parquet").write_bytes(b"PAR1 nothing PAR1")
    os.mkfifo(tmp_path / "responses-b-00000-000002-000002.parquet")
    (tmp_path / "_responses-b-00000-000003.arrow").write_bytes(random.Random(1).randbytes(5000))
    (tmp_path / "responses-b-00000-000004-000004.parquet").mkdir()
    (tmp_path / "responses-b-00000-000005-000005.parquet").symlink_to("nothing")
    (tmp_path / "responses-b-00000-000006-000006.parquet").symlink_to("responses-b-00000-000006-000006.parquet")
    read = read_table(tmp_path)
    assert len(read) == 2
    for number in range(1, 7):
        assert any(f"-00000{number}" in problem for problem in read.problems), number
    for hostile in ("99999999", "x", "-1", "", "\x1b[0m"):
        meta = {"loss": "x" * 9999, "rank": "0", "ranks": hostile}
        pq.write_table(
            pq.read_table(put(tmp_path / "meta", {})).replace_schema_metadata(meta), put(tmp_path / "meta", {})
        )
        assert len(read_table(tmp_path / "meta")) == 2


def test_a_column_that_only_some_files_have_is_read_and_merged(tmp_path: Path) -> None:
    """A file of another version has columns that this one does not know, and lacks some."""
    put(tmp_path, {"entropy": [0.5, 0.6], "word": ["a", "b"]}, "responses-a-00000-000000-000000.parquet")
    table = writer(tmp_path, part_appends=1)
    for step in range(2, 9):
        table.append(rows(step))
    table.close()
    read = read_table(tmp_path)
    assert len(names(tmp_path)) < 8 and len(read) == 2 + 7 * 3 and not read.problems
    np.testing.assert_allclose(read.columns["entropy"][:3], [0.5, 0.6, np.nan])
    assert read.texts["word"][read.columns["word"][:2]].tolist() == ["a", "b"] and read.columns["word"][2] == -1
    assert np.isnan(read.columns["A"][:2]).all() and read.columns["A"][2] == 2000


def test_a_damaged_part_is_left_where_it_is(tmp_path: Path) -> None:
    table = writer(tmp_path, part_appends=1)
    table.append(rows(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-50])
    for step in range(2, 40):
        table.append(rows(step))
    assert len(names(tmp_path)) < 16 and path.exists()
    assert counts(tmp_path) == {(step, 0): 3 for step in range(2, 40)}
    assert any(path.name in problem for problem in read_table(tmp_path).problems)


def test_a_run_folder_holds_its_table_in_a_folder_of_its_own(tmp_path: Path) -> None:
    table = writer(tmp_path / FOLDER)
    table.append(rows(1))
    assert counts(tmp_path) == {(1, 0): 3}
    assert str(tmp_path / "absent") in read_table(tmp_path / "absent").problems[0]
    table.close()
    (tmp_path / "grid").mkdir()
    (tmp_path / FOLDER).rename(tmp_path / "grid" / "one")
    assert str(tmp_path / "grid" / "one") in read_table(tmp_path / "grid").problems[0]


def test_a_file_of_somebodys_own_has_defaults(tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    pd.DataFrame({"S": [0.25, -0.5], "L": [3.0, 4.0], "prompt": [7, 7], "colour": ["r", "g"]}).to_parquet(path)
    read = read_table(path)
    assert read.columns["S"].dtype == np.float64 and read.columns["S"].tolist() == [0.25, -0.5]
    assert [read.columns[name].tolist() for name in ("L", "A", "step", "minibatch", "seed")] == [
        [3, 4],
        [0, 0],
        *[[1, 1]] * 3,
    ]
    assert read.columns["prompt"].tolist() == [0, 0] and read.texts["prompt"].tolist() == ["7"]
    table = writer(tmp_path / "table")
    table.append(rows(1, 1) | {"S": np.array([0.1, np.nan, 0.3])})
    table.close()
    (part,) = (tmp_path / "table").iterdir()
    read = read_table(part, columns=["reward"])
    assert (len(read), read.left_out) == (2, 1)


@pytest.mark.parametrize(
    "columns, part",
    [
        ({"S": [float("nan"), 1.0], "L": [1, 2]}, "column S"),
        ({"S": [float("inf"), 1.0], "L": [1, 2]}, "column S"),
        ({"S": [1.0, 1.0], "L": [0, 2]}, "column L"),
        ({"S": [1.0, 1.0], "L": [1, 2], "A": [float("nan"), 1]}, "column A"),
        ({"S": [1.0, 1.0], "L": [1, 2], "minibatch": [-1, 1]}, "minibatch=-1"),
        ({"S": [1.0, 1.0], "L": [1, 2], "minibatch": [0, 0]}, "minibatch > 0"),
        ({"S": [1.0, 1.0], "L": [1, 2], "step": [0.5, 1]}, "column step"),
        ({"S": [], "L": []}, "empty"),
        ({"S": [1.0]}, "L"),
        ({"S": ["a"], "L": [1]}, "S"),
    ],
)
def test_a_file_of_somebodys_own_is_refused_by_name_and_column(
    tmp_path: Path, columns: dict[str, Any], part: str
) -> None:
    path = tmp_path / "own.parquet"
    pd.DataFrame(columns).to_parquet(path)
    with pytest.raises(ValueError) as error:
        read_table(path)
    assert str(path) in str(error.value) and part in str(error.value)


def test_the_package_is_imported_without_pyarrow() -> None:
    code = "import sys, fspo.table; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_writer_that_is_opened_again_replaces_a_step_that_comes_again(tmp_path: Path) -> None:
    """With the identifier of before, and without a first step: anybody's loop that is resumed."""
    for steps in ((1, 2, 3), (3, 4)):
        table = writer(tmp_path)
        for step in steps:
            table.append(rows(step, 0))
        table.close()
    read = read_table(tmp_path)
    assert read.columns["step"].tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    (problem,) = read.problems
    assert str(tmp_path) in problem and "step 3," in problem and "run=" in problem


def test_a_part_that_cannot_be_closed_now_keeps_its_rows_and_is_closed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = writer(tmp_path, part_appends=2)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("fspo.table.TableWriter._write", no_room)
        for step in (1, 2):
            table.append(rows(step, 0))
    assert read_table(tmp_path).columns["step"].tolist() == [1] * 3 + [2] * 3
    table.append(rows(2, 0))  # done again
    table.append(rows(3, 0))
    table.close()
    assert read_table(tmp_path).columns["step"].tolist() == [1] * 3 + [2] * 3 + [3] * 3


def test_what_is_not_known_to_be_true_or_false_is_null(tmp_path: Path) -> None:
    table = writer(tmp_path)
    table.append(rows(1, 0) | {"truncated": np.array([1.0, np.nan, 0.0])})
    table.close()
    np.testing.assert_array_equal(read_table(tmp_path).columns["truncated"], [1.0, np.nan, 0.0])
    assert pd.read_parquet(tmp_path)["truncated"].tolist() == [True, None, False]


def test_a_rank_that_stopped_is_one_problem_however_long_the_others_go_on(tmp_path: Path) -> None:
    for rank, steps in ((0, 30), (1, 10)):
        table = writer(tmp_path, rank=rank, ranks=2)
        for step in range(1, steps + 1):
            table.append(rows(step, 0))
        table.close()
    read = read_table(tmp_path)
    (problem,) = read.problems
    assert "19 mini-batches" in problem and "step 11" in problem and "step 29" in problem
    assert read.last == (30, 0) and read.batches[-1].tolist() == [10, 0]
