"""The Python stacks of another process: by py-spy, or written by the process itself where ptrace is not allowed.

py-spy reads the memory of a process and needs nothing of it, but many clusters and containers allow that to nobody, or
to a parent only. So each process that imports verl writes its stacks to a memory file of its own when it gets a signal.
``faulthandler`` does that outside the interpreter: also where Python's lock is held. Defined here.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

#: In the run folder: the stacks of a run that hangs.
HANG_FILE: Final = "hang.txt"
#: A thread as py-spy describes it: ``thread_name``, ``owns_gil`` and ``frames``, the innermost first, of which each has
#: ``name``, ``filename``, ``short_filename`` and ``line``.
Thread = dict[str, Any]
#: Used by nobody else: not by Python, Ray, vLLM or SLURM.
SIGNAL: Final = getattr(signal, "SIGRTMIN", 0) + 9  # where there is none, nothing is registered either
#: How long py-spy may take, and how long a process has to write.
_PY_SPY_S, _WRITE_S = 20.0, 1.0
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def stacks_of(pid: int) -> tuple[list[Thread], str]:
    """The threads of a process, the main one last, and all of them as text, which also says why there are none."""
    py_spy = Path(sys.executable).with_name("py-spy")
    command = [str(py_spy), "dump", "--nonblocking", "--json", "--pid", str(pid)]
    reason = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S, check=True)
        threads = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        threads = _written_by(pid)
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
    threads = [thread for thread in threads if thread["frames"]]
    if not threads:  # of a process without Python, say
        return [], f"  no stack: {reason}\n"
    lines = []
    for thread in threads:
        lines += [f"  {thread['thread_name']}\n", *(f"    {place(frame)}\n" for frame in thread["frames"])]
    return threads, "".join(lines)


def place(frame: dict[str, Any]) -> str:
    """``function (file:line)`` of a frame."""
    return f"{frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"


# ---------------------------------------------------------------- where ptrace is not allowed


def write_when_asked() -> None:
    """Have this process, and those that are forked from it, write their stacks on the signal."""
    if hasattr(os, "memfd_create"):  # Linux
        _listen()
        os.register_at_fork(after_in_child=_listen)  # it would write to the file of its parent


def _listen() -> None:
    faulthandler.register(SIGNAL, file=os.memfd_create(_name(os.getpid())))  # on no disk, and gone with the process


def _name(pid: int) -> str:
    return f"fspo-stacks-{pid}"


def _written_by(pid: int) -> list[Thread]:
    """What the process writes on the signal; nothing if it has no such file (it would die of it), or is stopped."""
    try:
        file = next(fd for fd in Path(f"/proc/{pid}/fd").iterdir() if f":{_name(pid)} " in os.readlink(fd))
        before = file.stat().st_size
        os.kill(pid, SIGNAL)
        time.sleep(_WRITE_S)
        stacks = file.read_bytes()[before:].decode(errors="replace").split("\n\n")
    except (OSError, StopIteration):  # it has ended, or does not listen
        return []
    threads: list[Thread] = []
    for stack in stacks:
        frames = [
            {"name": name, "filename": path, "short_filename": Path(path).name, "line": int(line)}
            for path, line, name in _FRAME.findall(stack)
        ]
        threads.append({"thread_name": "thread", "owns_gil": False, "frames": frames})
    threads[-1]["thread_name"] = "MainThread"
    return threads
