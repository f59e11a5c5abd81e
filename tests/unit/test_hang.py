"""A run without progress: when it is warned of and ended, and which process is named."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from waiting import wait_until

from recipe.runner.faults import hang
from recipe.runner.faults.errors import Failure
from recipe.runner.faults.hang import HangLimit, stopped_of
from recipe.runner.faults.phase import FIRST_SYNC, Phase, write_phase
from recipe.runner.faults.processes import Process
from recipe.runner.progress import Progress

Begin = Callable[[str, str], "subprocess.Popen[bytes]"]
LISTENS = "from recipe.runner.faults.stacks import write_when_asked; write_when_asked()\n"
#: Holds Python's lock in a call into C, which waits for an input that never comes.
WAITS = """
import ctypes, os
def stuck():
    print(flush=True)
    ctypes.PyDLL(None).getchar()
"""


class Watched:
    """A limit over a run folder, and a clock that goes on only when a test says so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.now = 0.0
        monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.limit = HangLimit(100, folder, self.lines.append)

    def wait(self, seconds: int, stopped: Callable[[], list[Process]] = list) -> Failure | None:
        for _ in range(0, seconds, 5):
            self.now += 5
            if (failure := self.limit.look(stopped)) is not None:
                return failure
        return None


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


@pytest.mark.parametrize("phase", [None, Phase(3, "generation", 0.0, queue="3 responses finished; prompts: 1 running")])
def test_no_progress_is_warned_of_and_ends(watched: Watched, tmp_path: Path, phase: Phase | None) -> None:
    (tmp_path / "phase.json").write_text("{")  # after a loss of power
    if phase is not None:
        write_phase(tmp_path, phase)
    for seconds, lines in ((105, 0), (5, 1)):
        assert watched.wait(seconds, lambda: [Process("vLLM engine", 7, node="b")]) is None
        assert len(watched.lines) == lines
    (warning,) = watched.lines
    failure = watched.wait(100)
    assert failure is not None
    during = "during start-up: " if phase is None else f"during the generation of step 3 ({phase.queue}): "
    for text in (warning, failure.sentence):
        assert f"{during}the vLLM engine (process 7 on b) is stopped" in text and "run.hang_after_s" in text


@pytest.mark.parametrize("kind", ["responses", "lines", "phases"])
def test_progress_within_a_phase_counts(watched: Watched, tmp_path: Path, kind: str) -> None:
    progress = Progress()
    progress.write_to(tmp_path)
    for moves in range(10):
        queue = f"{moves * (kind == 'responses')} responses finished"
        write_phase(tmp_path, Phase(1, "generation", float(moves * (kind == "phases")), queue=queue))
        if kind == "lines":
            progress.say("a line")
        assert watched.wait(90) is None
    watched.now += 3600  # in which this process was stopped
    assert watched.limit.look(list) is None and watched.lines == []


def test_a_queue_that_drops_its_groups_is_no_progress(watched: Watched, tmp_path: Path) -> None:
    failures = []
    for round in range(10):
        for finished in (8, 16, 0):  # responses come, and all of their groups are dropped
            write_phase(tmp_path, Phase(1, "generation", 0.0, queue=f"{finished} responses finished; prompts: {round}"))
            failures.append(watched.wait(20))
    assert "during the generation of step 1 (" in next(filter(None, failures)).sentence


def test_the_first_weight_sync_ends_after_five_minutes(watched: Watched, tmp_path: Path) -> None:
    watched.limit = HangLimit(1e6, tmp_path, watched.lines.append)
    write_phase(tmp_path, Phase(0, "start-up", 0.0))
    assert watched.wait(1000) is None and watched.lines == []
    write_phase(tmp_path, Phase(0, FIRST_SYNC, 0.0))
    assert watched.wait(300) is None and len(watched.lines) == 1
    assert "6967" in watched.wait(20).sentence


def test_stacks_are_written_with_pythons_lock_held(begin: Begin, tmp_path: Path) -> None:
    code = LISTENS + WAITS + "if os.fork():\n    os.wait()\nstuck()"
    (forked,) = psutil.Process(begin("ray::WorkerDict", code).pid).children()
    assert stopped_of([Process("FSDP worker", forked.pid)]) == []
    wait_until(lambda: "in stuck" in (tmp_path / "log.err").read_text())


def test_a_stopped_process_is_seen_and_a_deaf_one_lives(begin: Begin) -> None:
    stopped, deaf = (begin(title, "print(flush=True); input()").pid for title in ("ray::TaskRunner", "ray::WorkerDict"))
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(stopped).status() == psutil.STATUS_STOPPED)
    both = [Process("trainer", stopped), Process("FSDP worker", deaf)]
    assert stopped_of(both) == both[:1]  # and each has been asked for its stacks
    time.sleep(0.2)
    assert psutil.Process(deaf).status() != psutil.STATUS_ZOMBIE
