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
from messages import holds
from waiting import wait_until

from recipe.runner.faults import hang
from recipe.runner.faults.errors import Failure
from recipe.runner.faults.hang import HangLimit, Snapshot, snapshots_of
from recipe.runner.faults.phase import FIRST_SYNC, PHASES, Phase, write_phase
from recipe.runner.faults.processes import Process, Processes, log_of
from recipe.runner.progress import Progress

Begin = Callable[[str, str], "subprocess.Popen[bytes]"]

WAITS = "import threading\ndef wait():\n    threading.Event().wait(60)\nprint(flush=True)\nwait()"
LISTENS = "from recipe.runner.faults.stacks import write_when_asked; write_when_asked()\n"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "_LOOK_EVERY_S", 0.0)


def snapshots(run_id: str) -> list[Snapshot]:
    processes = Processes(run_id)
    processes.first_end(seconds=0)
    return snapshots_of(processes)


def test_every_process_is_seen_as_it_is(run_id: str, begin: Begin) -> None:
    stopped, waits = begin("ray::TaskRunner", WAITS).pid, begin("ray::WorkerDict", LISTENS + WAITS).pid
    os.kill(stopped, signal.SIGSTOP)
    seen = {snapshot.process.pid: snapshot for snapshot in snapshots(run_id)}
    assert {pid: str(snapshot) for pid, snapshot in seen.items()} == {
        stopped: f"the trainer (process {stopped}) is stopped",
        waits: f"the FSDP worker (process {waits})",
    }


class Watched:
    """A limit that a thread looks at, over a run folder into which a test writes phases."""

    def __init__(self, seen: Callable[[], list[Snapshot]], folder: Path, after_s: float) -> None:
        self.lines: list[str] = []
        self.failure: Failure | None = None
        self.over = threading.Event()
        self._limit, self._seen = HangLimit(after_s, folder, self.lines.append), seen
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self.failure is None and not self.over.wait(0.02):
            self.failure = self._limit.look(self._seen)


def test_a_run_without_progress_is_warned_of_and_then_ended(
    run_id: str, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_END", 1000)
    trainer, reward = begin("ray::TaskRunner", WAITS).pid, begin("ray::RewardLoopWorker", LISTENS + WAITS).pid
    watched = Watched(lambda: snapshots(run_id), tmp_path, 0.4)
    wait_until(lambda: watched.lines)
    warning = watched.lines[0]
    for part in ("warning: no progress ", "during start-up", "no process is stopped", "hang_after_s"):
        assert part in warning
    log = Path(log_of(reward) or "")
    wait_until(lambda: "in wait" in log.read_text())
    os.kill(trainer, signal.SIGSTOP)
    write_phase(tmp_path, Phase(3, "generation", queue="3 responses finished"))
    wait_until(lambda: len(watched.lines) == 3)
    assert watched.lines[1].startswith("note: the run goes on") and watched.failure is None
    monkeypatch.setattr(hang, "_END", 1.75)
    wait_until(lambda: watched.failure)
    sentence = watched.failure.sentence
    assert "during the generation of step 3 (3 responses finished): the trainer" in sentence
    assert f"(process {trainer}) is stopped" in sentence and f"process {reward}" not in sentence


def test_the_first_weight_sync_has_a_limit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "_FIRST_SYNC_S", 0.3)
    for phase in PHASES:
        (tmp_path / phase).mkdir()
        write_phase(tmp_path / phase, Phase(0, phase, 0.0))
    others = [Watched(list, tmp_path / phase, 60.0) for phase in PHASES if phase != FIRST_SYNC]
    first = Watched(list, tmp_path / FIRST_SYNC, 60.0)
    wait_until(lambda: first.failure)
    assert re.search(holds("during the first weight sync", "start the run again", "6967"), first.failure.sentence)
    (warning,) = first.lines
    assert "during the first weight sync" in warning
    for watched in others:
        watched.over.set()
        assert watched.lines == [] and watched.failure is None


def test_a_shorter_limit_holds_for_the_first_weight_sync_too(tmp_path: Path) -> None:
    write_phase(tmp_path, Phase(0, FIRST_SYNC, 0.0))
    watched = Watched(list, tmp_path, 0.1)
    wait_until(lambda: watched.failure)


def test_a_process_elsewhere_is_named_with_its_node(tmp_path: Path) -> None:
    there = Snapshot(Process("vLLM engine", 7, node="b"), True)
    watched = Watched(lambda: [there], tmp_path, 0.1)
    wait_until(lambda: watched.failure)
    assert "the vLLM engine (process 7 on b) is stopped" in watched.failure.sentence


def test_processes_that_cannot_be_looked_at_do_not_keep_a_hang_alive(tmp_path: Path) -> None:
    watched = Watched(lambda: [1 / 0], tmp_path, 0.2)
    wait_until(lambda: watched.failure)
    assert "ZeroDivisionError" in watched.failure.sentence


@pytest.mark.parametrize("kind", ["responses", "lines"])
def test_progress_within_a_phase_counts(tmp_path: Path, kind: str) -> None:
    progress = Progress()
    progress.write_to(tmp_path)
    write_phase(tmp_path, Phase(1, "generation", 0.0))
    watched = Watched(list, tmp_path, 1.0)
    for moves in range(30):
        if kind == "responses":
            write_phase(tmp_path, Phase(1, "generation", 0.0, queue=f"{moves} responses finished"))
        else:
            progress.say("a line")
        time.sleep(0.05)
    watched.over.set()
    assert watched.lines == [] and watched.failure is None


def test_the_time_for_which_this_process_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    limit = HangLimit(60, tmp_path, lines.append)
    limit.look(list)
    began = time.monotonic()
    for seconds in (3600, 3603):
        monkeypatch.setattr(hang.time, "monotonic", lambda seconds=seconds: began + seconds)
        assert limit.look(list) is None
    assert lines == []
