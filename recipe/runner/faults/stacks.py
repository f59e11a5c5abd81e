"""The Python stacks of another process, which the process itself writes to its log when a signal asks it to.

Each process that imports verl listens. ``faulthandler`` writes also where Python's lock is held, and needs no ptrace,
which many clusters and containers allow to nobody.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from recipe.runner.faults.processes import log_of

#: Used by nobody else: not by Python, Ray, vLLM or SLURM.
SIGNAL: Final = getattr(signal, "SIGRTMIN", 0) + 9
#: How long the processes have to write.
_WRITE_S = 1.0
_NONE: Final = "  no stack: it is stopped, does not listen, or has no log\n"


def write_when_asked() -> None:
    """Have this process, and those that are forked from it, write their stacks to their log on the signal."""
    if hasattr(faulthandler, "register"):  # not Windows
        faulthandler.register(SIGNAL, file=2)


def stacks_of(pids: Iterable[int]) -> list[str]:
    """The stacks of each process: a line ``    FUNCTION (FILE:LINE)`` for each frame of each thread, innermost first.

    A process that cannot write them gets a line that says so. All are asked at once: a node of eight GPUs has dozens.
    """
    asked = [_ask(pid) for pid in pids]
    if any(asked):
        time.sleep(_WRITE_S)
    return [_NONE if place is None else _written(*place) for place in asked]


def _ask(pid: int) -> tuple[Path, int] | None:
    """Ask a process to write: its log, and where in it the stacks begin; None if it does not listen or has no log."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        log = Path(log_of(pid) or "")
        if caught is None or not int(caught[1], 16) >> (SIGNAL - 1) & 1 or not log.is_file():
            return None  # the signal would end a process that does not listen
        before = log.stat().st_size
        os.kill(pid, SIGNAL)
    except OSError:  # it has ended
        return None
    return log, before


def _written(log: Path, begin: int) -> str:
    try:
        text = log.read_bytes()[begin:].decode(errors="replace")
    except OSError:
        return _NONE
    return re.sub(r'^  File "(.*)", line (\d+) in (.*)$', r"    \3 (\1:\2)", text, flags=re.MULTILINE) or _NONE
