"""A run without progress: when it is warned of and ended, and which process is named."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import wait_until

from recipe.runner.faults import hang
from recipe.runner.faults.errors import Death
from recipe.runner.faults.hang import Doing, HangWatch, Patience, doing_here, suspects
from recipe.runner.faults.phase import Phase

Begin = Callable[[str, str], "subprocess.Popen[bytes]"]

SLEEPS = "import time\ndef compute_score():\n    time.sleep(60)\nprint(flush=True)\ncompute_score()"
WAITS = "import threading\nprint(flush=True)\nthreading.Event().wait(60)"
CALLED = """
import threading, time
def actor_method_executor():
    time.sleep(60)
actor_method_executor.__code__ = actor_method_executor.__code__.replace(co_filename="ray/_private/function_manager.py")
threading.Thread(target=actor_method_executor, daemon=True).start()
print(flush=True)
threading.Event().wait(60)
"""
LOOPS = "def endless():\n    while True:\n        pass\nprint(flush=True)\nendless()"


def test_patience_grows_with_what_a_phase_has_taken_lately() -> None:
    patience = Patience(90)
    for seconds in (20, 3):
        patience.measured(Phase(1, "update"), seconds)
    assert (patience.limit_s("update"), patience.limit_s("generation")) == (120, 90)
    for step in range(2, 7):
        patience.measured(Phase(step, "update"), 10)
    assert patience.limit_s("update") == 60
    for step in (1, 2, 3):
        assert patience.limit_s("generation") == 90
        patience.measured(Phase(step, "generation"), 1)
    assert patience.limit_s("generation") == 45


def test_each_process_is_seen_as_it_is(run_id: str, begin: Begin) -> None:
    reward, engine = begin("ray::RewardLoopWorker", SLEEPS).pid, begin("ray::WorkerDict", WAITS).pid
    loop, stopped = begin("VLLM::EngineCore", LOOPS).pid, begin("ray::TaskRunner", WAITS).pid
    os.kill(stopped, signal.SIGSTOP)
    by_pid = {doing.pid: doing for doing in doing_here(run_id)}
    assert (by_pid[reward].state, by_pid[reward].where) == ("waits", "compute_score (RewardLoopWorker.py:3)")
    assert (by_pid[engine].state, by_pid[engine].own) == ("waits", False)
    assert (by_pid[loop].state, by_pid[loop].role) == ("busy", "vLLM engine")
    assert by_pid[loop].where is not None and by_pid[loop].where.startswith("endless (EngineCore.py:")
    assert by_pid[stopped].words() == f"the trainer (process {stopped}) is stopped"
    assert "  MainThread\n    compute_score (RewardLoopWorker.py:3)\n" in by_pid[reward].stacks


def test_the_thread_that_executes_a_call_tells_where_an_actor_is(run_id: str, begin: Begin) -> None:
    begin("ray::WorkerDict", CALLED)
    (doing,) = doing_here(run_id)
    assert doing.where is not None and doing.where.startswith("actor_method_executor (")


def test_what_explains_a_hang_is_named() -> None:
    waits = Doing("trainer", 1, None, "waits", "get_objects (worker.py:1)", False, "")
    ranks = [replace(waits, role="FSDP worker", pid=pid, where="all_gather (distributed.py:2)") for pid in (2, 3, 4)]
    assert suspects([waits, *ranks]) == []
    elsewhere = replace(ranks[0], pid=5, where="barrier (distributed.py:9)", node="b")
    assert suspects([waits, *ranks, elsewhere]) == [elsewhere]
    assert suspects([waits, ranks[0], elsewhere]) == [ranks[0], elsewhere]
    assert suspects([waits, ranks[0]]) == []
    busy = replace(waits, role="vLLM engine", pid=6, state="busy")
    assert suspects([waits, *ranks, elsewhere, busy]) == [busy]
    own = replace(waits, role="reward worker", pid=7, own=True)
    assert suspects([waits, busy, own]) == [own]
    stopped = replace(waits, pid=8, state="stopped")
    assert suspects([own, busy, stopped]) == [stopped]
    assert elsewhere.words() == "the FSDP worker (process 5 on b) is in barrier (distributed.py:9)"


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
    run_id: str, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(hang, "_END", 100)
    reward = begin("ray::RewardLoopWorker", SLEEPS).pid
    watched = Watched(run_id, tmp_path, 0.4)
    wait_until(lambda: watched.lines)
    warning = watched.lines[0]
    for part in ("warning: no progress ", "during start-up", f"(process {reward}) is in compute_score", "hang_after_s"):
        assert part in warning
    assert f"{tmp_path}/hang.txt" in warning
    assert "compute_score (RewardLoopWorker.py:3)" in (tmp_path / "hang.txt").read_text()
    watched.phase = Phase(3, "generation", queue="3 responses finished")
    wait_until(lambda: len(watched.lines) == 2)
    assert watched.lines[1].startswith("note: the run goes on") and watched.hangs == []
    (tmp_path / "hang.txt").unlink()
    (tmp_path / "hang.txt").mkdir()  # as on a full disk: the hang must end the run all the same
    monkeypatch.setattr(hang, "_END", 1.75)
    wait_until(lambda: watched.hangs)
    sentence = watched.hangs[0].sentence()
    assert "during the generation of step 3 (3 responses finished): the reward worker" in sentence


def test_processes_that_cannot_be_looked_at_do_not_keep_a_hang_alive(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(hang, "doing_here", lambda run_id: 1 / 0)
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
