"""The stacks of a process, where py-spy may not look into it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from recipe.runner.faults import stacks
from recipe.runner.faults.stacks import stacks_of

Begin = Callable[[str], int]
LISTENS = "from recipe.runner.faults.stacks import write_when_asked; write_when_asked()\n"
#: Holds Python's lock in a call into C, which waits for an input that never comes.
WAITS = """
import ctypes, os, sys, threading
def other():
    threading.Event().wait(60)
threading.Thread(target=other, daemon=True).start()
def stuck():
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).getchar()
"""


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Starts a Python program; returns the number that it prints. py-spy is not allowed to look."""
    monkeypatch.setattr(stacks.subprocess, "run", _forbidden)
    begun: list[subprocess.Popen[str]] = []

    def begin(code: str) -> int:
        program, pipe = [sys.executable, "-c", code], subprocess.PIPE
        begun.append(subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, start_new_session=True))
        assert begun[-1].stdout is not None
        return int(begun[-1].stdout.readline())

    yield begin
    for process in begun:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _forbidden(*_: object, **__: object) -> None:
    raise subprocess.CalledProcessError(1, "py-spy", stderr="Error: Permission Denied: try running with sudo\n")


def test_a_process_tells_its_stacks_itself_also_with_pythons_lock_held(begin: Begin) -> None:
    pid = begin(LISTENS + WAITS + "stuck()")
    for _ in range(2):  # the second answer is not the first again
        (*others, main), text = stacks_of(pid)
        assert [frame["name"] for frame in main["frames"]] == ["stuck", "<module>"]
        assert len(others) == 1 and "other" in [frame["name"] for frame in others[0]["frames"]]
        assert "  MainThread\n    stuck (<string>:" in text


def test_a_forked_process_tells_its_own(begin: Begin) -> None:
    pid = begin(LISTENS + WAITS + "if os.fork():\n    os.wait()\nstuck()")
    ((main,), _) = stacks_of(pid)  # its parent has two threads
    assert main["frames"][0]["name"] == "stuck"


@pytest.mark.parametrize("listens", [False, True])
def test_a_process_that_does_not_listen_or_is_stopped_is_left_alone(begin: Begin, listens: bool) -> None:
    pid = begin((LISTENS if listens else "") + WAITS + "stuck()")
    if listens:
        os.kill(pid, signal.SIGSTOP)
    threads, text = stacks_of(pid)
    assert threads == [] and "Permission Denied" in text
    os.kill(pid, 0)
