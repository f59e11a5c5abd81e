"""The stacks of a process, which it writes itself."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from recipe.runner.faults.stacks import stacks_of

Begin = Callable[[str, str], "subprocess.Popen[bytes]"]
LISTENS = "from recipe.runner.faults.stacks import write_when_asked; write_when_asked()\n"
#: Holds Python's lock in a call into C, which waits for an input that never comes.
WAITS = """
import ctypes, os, threading
def other():
    threading.Event().wait(60)
threading.Thread(target=other, daemon=True).start()
def stuck():
    print(flush=True)
    ctypes.PyDLL(None).getchar()
"""


def test_a_process_tells_its_stacks_itself_also_with_pythons_lock_held(begin: Begin, tmp_path: Path) -> None:
    pid = begin("worker", LISTENS + WAITS + "stuck()").pid
    for _ in range(2):  # the second answer is not the first again
        (text,) = stacks_of([pid])
        assert text.count(f"    stuck ({tmp_path}/worker.py:") == 1
        assert text.count(f"    other ({tmp_path}/worker.py:") == 1


def test_a_forked_process_tells_its_own(begin: Begin, tmp_path: Path) -> None:
    parent = begin("worker", LISTENS + WAITS + "if os.fork():\n    os.wait()\nstuck()")
    (child,) = psutil.Process(parent.pid).children()
    (text,) = stacks_of([child.pid])  # its parent has two threads
    assert f"    stuck ({tmp_path}/worker.py:" in text and "    other (" not in text


@pytest.mark.parametrize("listens", [False, True])
def test_a_process_that_does_not_listen_or_is_stopped_is_left_alone(begin: Begin, listens: bool) -> None:
    pid = begin("worker", (LISTENS if listens else "") + WAITS + "stuck()").pid
    if listens:
        os.kill(pid, signal.SIGSTOP)
    assert stacks_of([pid])[0].startswith("  no stack: ")
    os.kill(pid, 0)
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
