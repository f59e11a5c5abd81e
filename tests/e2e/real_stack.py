"""Starts the real stack as a user would, and finds every process that a start has left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

#: Environment variable whose value every process of one start inherits.
MARK = "FSPO_TEST_RUN"
#: Small and quick, but everything real: two steps of 8 prompts x 8 responses, two mini-batches each. With fewer
#: responses a mini-batch whose groups all have equal rewards, and so no gradient, would not be rare enough.
SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
    "data.max_response_length=64",
    "fspo.offline_task.n_train=64",
    "fspo.offline_task.n_test=8",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.total_training_steps=2",
)


def user_environment() -> dict[str, str]:
    """This process's environment without what the tests set: a start decides about platform and threads itself."""
    return {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "OMP_NUM_THREADS")}


def marked_processes(mark: str) -> list[psutil.Process]:
    """Every living process that carries this mark (zombies do not count: nothing runs in them)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


@dataclass
class Start:
    """One start of ``python -m recipe.fspo.main`` in a process group of its own."""

    run_dir: Path
    overrides: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.log = self.run_dir / "stdout.log"
        command = [sys.executable, "-m", "recipe.fspo.main", f"fspo.run_dir={self.run_dir}", *self.overrides]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.run_dir,
                env={**user_environment(), **self.environment, MARK: self.mark},
                start_new_session=True,
                # A shell that runs the tests in the background lets them ignore Ctrl-C, and their children inherit it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Exit status; what the start printed is in the failure if the time is over."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not finished after {timeout} s; it printed:\n{self.output()[-4000:]}")

    def wait_for(self, text: str, timeout: float) -> None:
        """Return once the start has printed ``text``."""
        limit = time.monotonic() + timeout
        while text not in self.output():
            if self.process.poll() is not None or time.monotonic() > limit:
                pytest.fail(f"{text!r} was not printed; it printed:\n{self.output()[-4000:]}")
            time.sleep(0.3)

    def processes(self) -> list[psutil.Process]:
        """Every living process of this start."""
        return marked_processes(self.mark)

    def left_behind(self, within: float = 20.0) -> list[str]:
        """Names of the processes that are still there after ``within`` seconds."""
        limit = time.monotonic() + within
        while (alive := self.processes()) and time.monotonic() < limit:
            time.sleep(0.5)
        names = []
        for process in alive:
            with contextlib.suppress(psutil.Error):
                names.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        return names

    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by step."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return {entry["step"]: entry["metrics"] for entry in map(json.loads, lines)}

    def stop(self) -> None:
        """Kill whatever is left, by process id."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


@dataclass
class Starter:
    """Makes :class:`Start` objects and stops what is left of them."""

    starts: list[Start] = field(default_factory=list)

    def __call__(self, run_dir: Path, *overrides: str, **environment: str) -> Start:
        self.starts.append(Start(run_dir, overrides, environment))
        return self.starts[-1]
