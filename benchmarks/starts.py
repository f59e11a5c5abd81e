"""Starts of the real stack by benchmarks and tests: every process of a start can be found and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Final

import psutil

from recipe.runner.faults.processes import is_alive, kill

#: Environment variable whose value every process of one start inherits.
MARK: Final = "FSPO_START"
#: The demo, small and quick, but everything real: two steps of 8 prompts x 8 responses of at most 64 tokens, two
#: mini-batches each. With fewer responses a mini-batch whose groups all have equal rewards, and so no gradient, would
#: not be rare enough.
SMALL: Final = (
    "experiment=demo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.max_response_length=64",
    "data.offline_task.n_train=64",
    "data.offline_task.n_test=8",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.total_training_steps=2",
)


def user_environment() -> dict[str, str]:
    """This process's environment without what tests set: a start decides about platform and threads itself."""
    return {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "OMP_NUM_THREADS")}


def marked_processes(mark: str) -> list[psutil.Process]:
    """Every living process that carries this mark."""
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # another user's, or gone
            if process.environ().get(MARK) == mark and is_alive(process.pid):
                marked.append(process)
    return marked


class Start:
    """``python -m WORDS`` in a process group of its own, in a folder, with everything that it prints in a log there."""

    def __init__(self, folder: Path, *words: str, log: str = "stdout.log", **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log, self.mark = folder, folder / log, uuid.uuid4().hex
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**user_environment(), **environment, MARK: self.mark},
                start_new_session=True,
                # A shell that runs the tests in the background lets them ignore Ctrl-C, and their children inherit it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def output(self) -> str:
        """What the start has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def pids(self) -> list[int]:
        """Living processes of this start."""
        return [process.pid for process in marked_processes(self.mark)]

    def left(self, within: float = 60.0) -> list[int]:
        """Those that are still there after ``within`` seconds."""
        limit = time.monotonic() + within
        while (pids := self.pids()) and time.monotonic() < limit:
            time.sleep(0.2)
        return pids

    def stop(self) -> None:
        """Kill whatever is left, by process id."""
        kill(self.pids())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
