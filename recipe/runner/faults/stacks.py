"""The Python stacks of a process that imports verl, which it writes to its own log when a signal asks it to.

``faulthandler`` writes also where Python's lock is held, and needs no ptrace, which many clusters allow to nobody.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: Used by nobody else: not by Python, Ray, vLLM or SLURM.
SIGNAL: Final = signal.SIGRTMIN + 9


def write_when_asked() -> None:
    """Have this process, and those that are forked from it, write their stacks to their log on the signal."""
    faulthandler.register(SIGNAL, file=2)


def ask_for_stacks(pids: Iterable[int]) -> None:
    """Ask each process that listens: the signal would end another."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            if caught is not None and int(caught[1], 16) >> (SIGNAL - 1) & 1:
                os.kill(pid, SIGNAL)
