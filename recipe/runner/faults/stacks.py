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
_NAME: Final = "fspo-stacks"
#: How long py-spy may take, and how long a process has to write.
_PY_SPY_S, _WRITE_S = 20.0, 1.0
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) (\w+)")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_file: int | None = None


def write_when_asked() -> None:
    """Have this process, and those that are forked from it, write their stacks on the signal."""
    global _file
    if hasattr(os, "memfd_create"):  # Linux
        parents, _file = _file, os.memfd_create(_NAME)  # on no disk, and gone with the process
        faulthandler.register(SIGNAL, file=_file)
        if parents is not None:
            os.close(parents)


# A forked process has the signal's handler, and with it the file of its parent.
os.register_at_fork(after_in_child=lambda: write_when_asked() if _file is not None else None)


def threads_of(pid: int) -> list[Thread]:
    """The threads of a process, the main one last.

    Raises:
        OSError: Neither way shows them; the reason.
    """
    py_spy = Path(sys.executable).with_name("py-spy")
    command = [str(py_spy) if py_spy.exists() else "py-spy", "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S, check=True)
        return [thread for thread in json.loads(done.stdout) if thread["frames"]]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        if threads := _written_by(pid):
            return threads
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [""]
        raise OSError(reason[0]) from None


def stacks_of(pid: int) -> tuple[list[Thread], str]:
    """The threads of a process, and all of them as text."""
    try:
        threads = threads_of(pid)
    except OSError as error:
        return [], f"  no stack: {error}\n"  # of a process without Python, say
    lines = []
    for thread in threads:
        lines += [f"  {thread['thread_name']}", *(f"    {place(frame)}" for frame in thread["frames"])]
    return threads, "".join(f"{line}\n" for line in lines)


def place(frame: dict[str, Any]) -> str:
    """``function (file:line)`` of a frame."""
    return f"{frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"


def _written_by(pid: int) -> list[Thread]:
    """What the process writes on the signal; nothing if it does not listen, or has been stopped."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        if caught is None or not int(caught[1], 16) >> (SIGNAL - 1) & 1:
            return []  # it would die of the signal
        file = next(fd for fd in Path(f"/proc/{pid}/fd").iterdir() if _NAME in os.readlink(fd))
        before = file.stat().st_size
        os.kill(pid, SIGNAL)
        time.sleep(_WRITE_S)
        return _parsed(file.read_bytes()[before:].decode(errors="replace"))
    except (OSError, StopIteration):  # it has ended
        return []


def _parsed(text: str) -> list[Thread]:
    threads: list[Thread] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            threads.append({"thread_name": f"Thread {thread[1]}", "owns_gil": False, "frames": []})
        elif threads and (frame := _FRAME.match(line)):
            file, number, name = frame.groups()
            short = Path(file).name
            threads[-1]["frames"].append({"name": name, "filename": file, "short_filename": short, "line": int(number)})
    if threads:
        threads[-1]["thread_name"] = "MainThread"
    return [thread for thread in threads if thread["frames"]]
