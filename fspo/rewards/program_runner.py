"""The processes of one program that :mod:`fspo.rewards.program` runs; itself run as a script, without site-packages.

Each program gets two processes. The outer one (this file) adopts whatever the program leaves behind, ends it, and
reports; it ends when its parent does. The inner one sets its limits and becomes the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys

_PARENT_DIED, _ADOPT_ORPHANS = 1, 36  # of prctl(2): PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER


def _limit(what: int, most: float) -> None:
    _, hard = resource.getrlimit(what)
    value = int(most) if hard == resource.RLIM_INFINITY else min(int(most), hard)
    resource.setrlimit(what, (value, value))


def _become(program: str, limits: dict[str, float]) -> None:
    """In the inner process: set the limits, then run the program in place of this one."""
    _limit(resource.RLIMIT_CPU, math.ceil(limits["time_s"]) + 1)  # whole seconds: in case it ignores the next
    _limit(resource.RLIMIT_AS, limits["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, limits["output_bytes"])
    _limit(resource.RLIMIT_NPROC, 0)  # the kernel lets root start processes all the same
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_CORE, 0)
    signal.setitimer(signal.ITIMER_PROF, limits["time_s"])  # processor time; kept across exec
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-X", "utf8", program])


def _children(parent: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    after_name = file.read().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if after_name[1] == str(parent):
                found.append(int(entry))
    return found


def _end_descendants() -> None:
    """Kill and collect the children of this process until there are none; orphans of a killed child come here."""
    while True:
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        for pid in _children(os.getpid()):
            os.kill(pid, signal.SIGKILL)


def main(program: str, limits: dict[str, float]) -> None:
    """Run ``program`` (a file) with this process's standard streams; exit like it, or report its signal as 128 + n."""
    parent = os.getppid()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PARENT_DIED, signal.SIGKILL)
    prctl(_ADOPT_ORPHANS, 1)
    if os.getppid() != parent:
        return
    outer = os.getpid()
    inner = os.fork()
    if inner == 0:
        prctl(_PARENT_DIED, signal.SIGKILL)
        if os.getppid() == outer:
            _become(program, limits)
        os._exit(1)

    timed_out = []

    def stop(*_: object) -> None:
        timed_out.append(True)
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(inner, signal.SIGKILL)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limits["wall_s"])
    _, status = os.waitpid(inner, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _end_descendants()
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 + signal.SIGPROF if timed_out else code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
