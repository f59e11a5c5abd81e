"""Which rank others wait for in a collective, by what PyTorch's flight recorder has of each."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipe.runner.faults.collectives import DUMP, Entered, ask, dump_to, missing, told_by_dumps
from recipe.runner.faults.processes import RUN_ID_VARIABLE

RANK = """
import sys, threading, time, torch
from torch import distributed
from torch._C import _distributed_c10d
from recipe.runner.faults import collectives
rank, what, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
collectives.answer(rank)
ones_2 = torch.ones(2)
distributed.all_reduce(ones_2)
while not next(iter(collectives.entered_here().values()))[1][1]:
    time.sleep(0.01)  # it is marked as done a moment after it has returned
if what == "reduces":
    distributed.all_reduce(ones_2, async_op=True)
elif what == "gathers":
    distributed.all_gather([torch.ones(2), torch.ones(2)], ones_2, async_op=True)
with open(f"{folder}/collectives_rank{rank}", "wb") as file:
    file.write(_distributed_c10d._dump_fr_trace())
print(flush=True)
threading.Event().wait(60)
"""


class Ranks:
    """Two processes that have reduced together, and what each did next."""

    def __init__(self, run_id: str, folder: Path, *did: str) -> None:
        self.run_id, program = run_id, folder / "rank.py"
        program.write_text(RANK, encoding="utf-8")
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(program), str(rank), what, str(folder)],
                env={**os.environ, RUN_ID_VARIABLE: run_id, "PYTHONPATH": str(Path(__file__).parents[2])},
                stdout=subprocess.PIPE,
            )
            for rank, what in enumerate(did)
        ]
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"

    def ask(self) -> dict[int, Entered]:
        return dict(told for process in self.processes if (told := ask(self.run_id, process.pid)) is not None)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def test_real_ranks_answer_and_dump(run_id: str, tmp_path: Path) -> None:
    with Ranks(run_id, tmp_path, "reduces", "nothing") as ranks:
        told, dumped = ranks.ask(), told_by_dumps(tmp_path)
    found = missing(told)
    assert found is not None and found[0] == [1]
    assert found[1].startswith("has not entered all_reduce, collective 2 of gloo's group 0 default_pg, in which")
    assert dumped == f"rank 1 {found[1]}"
    assert ranks.ask() == {}  # a process that is gone


def test_ranks_in_different_collectives(run_id: str, tmp_path: Path) -> None:
    with Ranks(run_id, tmp_path, "reduces", "gathers") as ranks:
        assert missing(ranks.ask()) == (
            [1],
            "is in all_gather, others in all_reduce, as collective 2 of gloo's group 0 default_pg",
        )


def test_the_root_is_named_and_not_who_waits_for_it() -> None:
    shard, replica = "nccl's group 1 shard", "nccl's group 2 replicate"
    done, gather, reduce = ("all_gather", True), ("all_gather", False), ("all_reduce", False)
    ranks = {
        0: {shard: {4: done}, replica: {7: reduce}},  # waits for rank 2
        1: {shard: {4: done, 5: gather}},  # waits for rank 0
        2: {replica: {6: done}},
    }
    assert missing(ranks) == ([2], f"has not entered all_reduce, collective 7 of {replica}, in which others wait")
    assert missing({0: ranks[1], 1: ranks[1]}) is None  # all are in it: it is only slow
    assert missing({}) is None
    unmarked = {shard: {3: gather, 4: done}}  # one of several that NCCL ran as one
    assert missing({0: unmarked, 1: {shard: {4: done}}}) is None


def test_where_nccl_writes_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "")  # put back afterwards
    (tmp_path / f"{DUMP}3").write_bytes(b"of an earlier start")
    (tmp_path / f"{DUMP}4").write_bytes(b"half-written")
    dump_to(tmp_path, 3)
    assert not (tmp_path / f"{DUMP}3").exists()
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / DUMP)
    assert told_by_dumps(tmp_path) is None
    library = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        assert text.find(b"TORCH_FR_DUMP_TEMP_FILE\0") > 0  # PyTorch reads it under this name
