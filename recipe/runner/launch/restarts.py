"""``run.restarts=N``: a run that failed is started again from its last checkpoint, N times an hour at most.

The command becomes the parent of one start after the other, so that the death of a launching process costs no more than
that of any other. Each start is the user's command with the same run folder. Two failures without getting
beyond a step are a fault that starting again does not mend, and end it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fspo.records import METRICS_FILE, step_lines
from recipe.runner.faults.phase import read_phase
from recipe.runner.faults.preemption import WARNED, warning_waits
from recipe.runner.faults.processes import kill, processes_of
from recipe.runner.launch.commands import FAILED
from recipe.runner.launch.compose import quoted
from recipe.runner.launch.progress import say
from recipe.runner.launch.run_folder import RESTARTED
from recipe.runner.launch.run_settings import run_info

_FAMILY: Final = "FSPO_FAMILY"
_HOUR_S: Final = 3600.0
#: How long what a start has left may take to end by itself: the reaper needs 6 s and as much as 10 s to kill.
_GONE_S: Final = 30.0
#: Ended by somebody on purpose; a killed process was not.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(module: str, arguments: Sequence[str], run_dir: Path, limit: int) -> int:
    """Start ``python -m MODULE ARGUMENTS`` until it ends otherwise than by a failure; the last start's exit status.

    All starts have the run folder ``run_dir``. There are ``limit`` restarts in an hour at most.
    """
    family, restarts, reason = uuid.uuid4().hex, 0, ""
    recent: deque[float] = deque(maxlen=limit)
    command = [sys.executable, "-m", module, *arguments, f"run.dir={quoted(run_dir)}"]
    with Starts() as starts:
        while True:
            before, begun = _last_step(run_dir), len(_starts(run_dir))
            facts = {"restarts": restarts} | ({"reason": reason} if reason else {})
            code = starts.run(command, {**os.environ, RESTARTED: json.dumps(facts), _FAMILY: family})
            _wait_until_gone(family)
            if code != FAILED and (code >= 0 or -code in _ENDING):
                return code if code >= 0 else 128 - code
            if (signum := starts.ended_by) is not None:
                return 128 + signum
            reason = _reason(run_dir, code, begun)
            stop = None
            if restarts and _last_step(run_dir) <= before:
                stop = f"it failed twice without getting beyond step {before}"
            elif len(recent) == limit and time.monotonic() - recent[0] < _HOUR_S:
                stop = f"it has been restarted {limit} times within an hour (run.restarts)"
            if stop is not None:
                say(f"error: not started again: {stop}", sys.stderr)
                return FAILED
            recent.append(time.monotonic())
            restarts += 1
            say(f"restart {restarts}: {reason}", sys.stdout)


class Starts:
    """One start after the other. Signals for this process are for them, also those that come between two."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: set[int] = {signal.SIGUSR1} if WARNED.is_set() else set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Starts:
        for each in (*_ENDING, signal.SIGUSR1):
            if each == signal.SIGUSR1 or signal.getsignal(each) is not signal.SIG_IGN:  # nohup
                self._before[each] = signal.signal(each, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _pass_on(self, signum: int, _: object) -> None:
        self._waiting.add(signum)  # a warning is also for the starts that are to come, an end lets none come
        if self._process is not None:
            self._process.send_signal(signum)

    @property
    def ended_by(self) -> int | None:
        """The signal that asked for the end of the run."""
        return min(self._waiting & set(_ENDING), default=None)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """One start; its exit status."""
        with warning_waits():
            # In a group of its own: a terminal's Ctrl-C reaches it once, from here.
            self._process = subprocess.Popen(command, env=dict(environment), process_group=0)
        for signum in tuple(self._waiting):
            self._process.send_signal(signum)
        try:
            return self._process.wait()
        finally:
            self._process = None


def _wait_until_gone(family: str) -> None:
    limit = time.monotonic() + _GONE_S
    while (left := processes_of(family, variable=_FAMILY)) and time.monotonic() < limit:
        time.sleep(0.2)
    kill(left)


def _last_step(run_dir: Path) -> int:
    """The last step that was done; 0 without any."""
    return max((line["step"] for line in step_lines(run_dir / METRICS_FILE)), default=0)


def _starts(run_dir: Path) -> list[dict[str, Any]]:
    return (run_info(run_dir) or {}).get("starts") or []


def _reason(run_dir: Path, code: int, begun: int) -> str:
    """Why the last start failed; error and phase are an earlier one's while the folder has only ``begun`` starts."""
    starts = _starts(run_dir)[begun:]
    if starts and (said := starts[-1].get("error")) is not None:
        return str(said)
    phase = read_phase(run_dir) if starts else None
    how = f"by signal {-code}" if code < 0 else f"with status {code}"
    return f"the launching process ended {how}" + (f" {phase.words()}" if phase else "")
