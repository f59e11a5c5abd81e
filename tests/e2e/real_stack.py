"""Starts the real stack as a user would (:mod:`benchmarks.starts`), and waits for what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from benchmarks import starts
from benchmarks.starts import MARK, SMALL, marked_processes, user_environment
from recipe.runner.faults.processes import kill

REPOSITORY = Path(__file__).parents[2]

__all__ = [
    "MARK",
    "SMALL",
    "Start",
    "Starter",
    "marked_processes",
    "model_with_another_eos",
    "run_marked",
    "user_environment",
]


def model_with_another_eos(folder: Path) -> Path:
    """The demo's model, which ends its turns with ``<eos>`` (1), in files that call ``<pad>`` (0) the eos.

    A base model is so: its chat template ends a turn with a token that neither of its files calls eos.
    """
    shutil.copytree(REPOSITORY / "recipe/math/data/assets/demo_model", folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        settings |= {"eos_token": "<pad>"} if name.startswith("tokenizer") else {"eos_token_id": 0}
        (folder / name).write_text(json.dumps(settings))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{ eos_token }}", "<eos>"))
    return folder


def run_marked(*words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """A program of Python's to its end; whatever it leaves behind is ended, too."""
    mark = uuid.uuid4().hex
    # A script has its own folder on the path, not the repository, which `python -m pytest` has.
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**user_environment(), "PYTHONPATH": path, MARK: mark}
    try:
        return subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=timeout, env=environment
        )
    finally:
        left = marked_processes(mark)
        kill([process.pid for process in left])
        psutil.wait_procs(left, 10)


class Start(starts.Start):
    """One start of ``python -m recipe.fspo.main``."""

    def __init__(self, run_dir: Path, *overrides: str, **environment: str) -> None:
        super().__init__(run_dir, "recipe.fspo.main", f"run.dir={run_dir}", *overrides, **environment)
        self.run_dir = run_dir

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

    def left_behind(self) -> list[str]:
        """Names of the processes that are still there after 20 seconds."""
        names = []
        for pid in self.left():
            with contextlib.suppress(psutil.Error):
                names.append(f"{pid} {' '.join(psutil.Process(pid).cmdline())[:80]}")
        return names

    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by step."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return {entry["step"]: entry["metrics"] for entry in map(json.loads, lines)}


@dataclass
class Starter:
    """Makes :class:`Start` objects and stops what is left of them."""

    starts: list[Start] = field(default_factory=list)

    def __call__(self, run_dir: Path, *overrides: str, **environment: str) -> Start:
        self.starts.append(Start(run_dir, *overrides, **environment))
        return self.starts[-1]
