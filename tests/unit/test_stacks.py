"""The stacks of a process, which it writes to its own log."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from recipe.runner.faults.processes import log_of
from recipe.runner.faults.stacks import ask_for_stacks

Begin = Callable[[str, str], "subprocess.Popen[bytes]"]
LISTENS = "from recipe.runner.faults.stacks import write_when_asked; write_when_asked()\n"
#: Holds Python's lock in a call into C, which waits for an input that never comes.
WAITS = """
import ctypes, os
def stuck():
    print(flush=True)
    ctypes.PyDLL(None).getchar()
"""


@pytest.mark.parametrize("forks", [False, True])
def test_a_process_writes_its_stacks_to_its_log_also_with_pythons_lock_held(begin: Begin, forks: bool) -> None:
    process = psutil.Process(
        begin("worker", LISTENS + WAITS + "if os.fork():\n    os.wait()\n" * forks + "stuck()").pid
    )
    pid = process.children()[0].pid if forks else process.pid
    log = Path(log_of(pid) or "")
    ask_for_stacks([pid])
    wait_until(lambda: "in stuck" in log.read_text())


def test_a_process_that_does_not_listen_is_left_alone(begin: Begin) -> None:
    pid = begin("worker", WAITS + "stuck()").pid
    ask_for_stacks([pid])
    os.kill(pid, 0)
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
