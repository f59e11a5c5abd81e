"""A run without progress: when it is warned of and ended, and which process is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_until

from recipe.runner.faults import hang
from recipe.runner.faults.errors import Death
from recipe.runner.faults.hang import HangWatch, looks_here
from recipe.runner.faults.phase import Phase

Begin = Callable[[str, str], "subprocess.Popen[bytes]"]

#: A reward function that waits in a library.
REWARD = "import threading\ndef compute_score():\n    threading.Event().wait(60)\nprint(flush=True)\ncompute_score()"
LOOPS = "def endless():\n    while True:\n        pass\nprint(flush=True)\nendless()"
WAITS = "import threading\nprint(flush=True)\nthreading.Event().wait(60)"


@pytest.fixture
def library(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Starts a process that waits in code of a library only."""

    def begin_library(title: str) -> int:
        installed = str(tmp_path / f"{title.rpartition(':')[2]}.py")
        monkeypatch.setattr(hang, "_LIBRARIES", (*hang._LIBRARIES, installed))
        return begin(title, WAITS).pid

    return begin_library


def test_every_process_is_seen_as_it_is(run_id: str, begin: Begin, library: Callable[[str], int]) -> None:
    reward, loop = begin("ray::RewardLoopWorker", REWARD).pid, begin("VLLM::EngineCore", LOOPS).pid
    waits, stopped = library("ray::WorkerDict"), library("ray::TaskRunner")
    os.kill(stopped, signal.SIGSTOP)
    words = {int(re.search(r"process (\d+)", look.process)[1]): look.words() for look in looks_here(run_id)}
    assert words[reward] == f"the reward worker (process {reward}) is in compute_score (RewardLoopWorker.py:3)"
    assert words[loop].startswith(f"the vLLM engine (process {loop}) is in endless (EngineCore.py:")
    assert words[stopped] == f"the trainer (process {stopped}) is stopped"
    assert words[waits] == f"the FSDP worker (process {waits}) is in a library"
    assert set(words) == {reward, loop, waits, stopped}


def test_a_process_elsewhere_is_named_with_its_node(run_id: str, begin: Begin) -> None:
    worker = begin("ray::WorkerDict", REWARD)
    (look,) = looks_here(run_id, "node-b")
    assert look.words().startswith(f"the FSDP worker (process {worker.pid} on node-b) is in compute_score (")


class Watched:
    """A watch over a phase that a test sets."""

    def __init__(self, run_id: str, folder: Path, after_s: float) -> None:
        self.phase: Phase | None = None
        self.lines: list[str] = []
        self.hangs: list[Death] = []
        self.over = threading.Event()
        HangWatch(
            run_id, folder, after_s, lambda: self.phase, lambda: 0, self.lines.append, self.hangs.append, self.over
        ).start()


def test_a_run_without_progress_is_warned_of_and_then_ended(
    run_id: str, begin: Begin, library: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(hang, "_END", 100)
    reward = begin("ray::RewardLoopWorker", REWARD).pid
    trainer = library("ray::TaskRunner")
    watched = Watched(run_id, tmp_path, 0.4)
    wait_until(lambda: watched.lines)
    warning = watched.lines[0]
    for part in ("warning: no progress ", "during start-up", f"(process {reward}) is in compute_score", "hang_after_s"):
        assert part in warning
    assert f"{tmp_path}/hang.txt" in warning and f"process {trainer}" not in warning
    stacks = (tmp_path / "hang.txt").read_text()
    assert f"compute_score ({tmp_path}/RewardLoopWorker.py:3)" in stacks and f"{tmp_path}/TaskRunner.py:3" in stacks
    watched.phase = Phase(3, "generation", queue="3 responses finished")
    wait_until(lambda: len(watched.lines) == 2)
    assert watched.lines[1].startswith("note: the run goes on") and watched.hangs == []
    os.kill(trainer, signal.SIGSTOP)  # which explains more than a process that runs
    (tmp_path / "hang.txt").unlink()
    (tmp_path / "hang.txt").mkdir()  # as on a full disk: the hang must end the run all the same
    monkeypatch.setattr(hang, "_END", 1.75)
    wait_until(lambda: watched.hangs)
    sentence = watched.hangs[0].sentence()
    assert "during the generation of step 3 (3 responses finished): the trainer" in sentence
    assert f"(process {trainer}) is stopped" in sentence and f"process {reward}" not in sentence


def test_processes_that_cannot_be_looked_at_do_not_keep_a_hang_alive(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(hang, "looks_here", lambda run_id: 1 / 0)
    watched = Watched(run_id, tmp_path, 0.2)
    wait_until(lambda: watched.hangs)
    assert "ZeroDivisionError" in watched.hangs[0].sentence()


def test_progress_within_a_phase_counts(run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "_LOOK_EVERY_S", 0.05)
    watched = Watched(run_id, tmp_path, 1.0)
    for moves in range(30):  # as responses finish
        watched.phase = Phase(1, "generation", 0.0, queue=f"{moves} responses finished")
        time.sleep(0.05)
    watched.over.set()
    assert watched.lines == [] and watched.hangs == []
