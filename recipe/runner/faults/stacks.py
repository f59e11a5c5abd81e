"""The Python stacks of another process: by py-spy, or written by the process itself where ptrace is refused.

py-spy needs nothing of the process, but many clusters and containers allow ptrace to nobody. So each process that
imports verl writes its stacks to its log on a signal: ``faulthandler`` does that also where Python's lock is held.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from recipe.runner.faults.processes import log_of

#: Used by nobody else: not by Python, Ray, vLLM or SLURM.
SIGNAL: Final = getattr(signal, "SIGRTMIN", 0) + 9
#: How long py-spy may take, and how long a process has to write.
_PY_SPY_S, _WRITE_S = 20.0, 1.0


def stacks_of(pid: int) -> str:
    """All threads, a line ``    FUNCTION (FILE:LINE)`` for each frame, the innermost first; or why there are none."""
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--full-filenames"]
    try:
        command += ["--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split("\n\n")[0].split())
        return _written_by(pid) or f"  no stack: {reason}\n"


def write_when_asked() -> None:
    """Have this process, and those that are forked from it, write their stacks to their log on the signal."""
    if hasattr(faulthandler, "register"):  # not Windows
        faulthandler.register(SIGNAL, file=2)


def _written_by(pid: int) -> str:
    """What the process writes on the signal; nothing if it is stopped, or does not listen: it would die of it."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        log = Path(log_of(pid) or "")
        if caught is None or not int(caught[1], 16) >> (SIGNAL - 1) & 1 or not log.is_file():
            return ""
        before = log.stat().st_size
        os.kill(pid, SIGNAL)
        time.sleep(_WRITE_S)
        text = log.read_bytes()[before:].decode(errors="replace")
    except OSError:  # it has ended
        return ""
    return re.sub(r'^  File "(.*)", line (\d+) in (.*)$', r"    \3 (\1:\2)", text, flags=re.MULTILINE)
