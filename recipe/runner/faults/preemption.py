"""The warning before a cluster takes a machine back: SIGUSR1 to the launching process, saved state, exit status 75.

The launching process notes the signal and calls the trainer's process, which finishes the step in progress, saves and
raises :class:`Preempted`. Before the first step there is nothing to save, and the run ends at once. A first Ctrl-C does
the same, with exit status 130; a second one ends the run at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Exit status of a run that has saved its state and wants to be started again (EX_TEMPFAIL of sysexits.h).
PREEMPTED = 75
#: Exit status after Ctrl-C, as shells give it.
INTERRUPTED = 128 + signal.SIGINT


class Preempted(Exception):
    """The run ended early because it was warned, and can be continued."""


NOTHING_TO_SAVE = "preempted before the first step: there was nothing to save"
#: Set in the launching process when the signal, or a first Ctrl-C, has come.
WARNED = threading.Event()


@contextlib.contextmanager
def warning_waits() -> Iterator[None]:
    """Processes that are started meanwhile get SIGUSR1 only when they watch for it; until then one would die of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch_for_warning() -> None:
    """Note SIGUSR1 in :data:`WARNED` instead of dying of it. Call in the main thread."""

    def note(*_: object) -> None:
        WARNED.set()
        # It may come again at any time, and Python gives up its own handlers, but not this, before a process has ended.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    signal.signal(signal.SIGUSR1, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


#: The signals that end this process's run: Ray raises a KeyboardInterrupt of its own in place of another. SIGINT alone
#: is here from the first Ctrl-C on, while the run goes on to its save.
ENDED_BY: list[signal.Signals] = []


def end_on_signals() -> None:
    """Let SIGTERM, and SIGHUP of a closed terminal, end a run as Ctrl-C does, and note it in :data:`ENDED_BY`.

    Call in the main thread, and again after ``ray.init``, which takes SIGTERM for a handler of its own that prints a
    C++ stack trace.

    Raises:
        KeyboardInterrupt: in the main thread, once, when one of them comes.
    """

    def end(signum: int, _: object) -> None:
        _end_by(signal.Signals(signum))

    for warning in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(warning) is not signal.SIG_IGN:  # nohup
            signal.signal(warning, end)


def _end_by(signum: signal.Signals) -> None:
    for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)  # the end takes a few seconds, and is under way
    ENDED_BY.append(signum)
    raise KeyboardInterrupt


def _on_ctrl_c(handler: Callable[[int, Any], object]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job
        signal.signal(signal.SIGINT, handler)


def leave_on_ctrl_c() -> None:
    """Until the launch begins, let Ctrl-C end this process with a sentence, whatever it imports or composes meanwhile.

    An import can swallow an exception, or turn it into another. Call in the main thread.
    """

    def leave(*_: object) -> None:
        os.write(2, b"interrupted before the run began\n")
        os._exit(INTERRUPTED)

    _on_ctrl_c(leave)


def end_on_ctrl_c() -> None:
    """Let Ctrl-C end the launch at once, by a KeyboardInterrupt in the main thread, from which this is called."""
    _on_ctrl_c(lambda *_: _end_by(signal.SIGINT))


def save_on_ctrl_c() -> None:
    """Let the next Ctrl-C save as a warning does, and the one after it end the run at once. Call in the main thread."""

    def save(*_: object) -> None:
        ENDED_BY.append(signal.SIGINT)
        WARNED.set()
        end_on_ctrl_c()

    _on_ctrl_c(save)


class StopRequest:
    """In the trainer's process: whether the run shall end after the step in progress."""

    def __init__(self) -> None:
        self.requested = False
        self.training = False

    def request(self) -> bool:
        """Ask for the end. Returns False if training has not begun, so that there is no step to wait for."""
        self.requested = True
        return self.training


#: The request of this process.
STOP = StopRequest()
