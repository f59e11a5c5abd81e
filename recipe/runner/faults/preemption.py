"""The warning before a cluster takes a machine back: SIGUSR1 to the launching process, saved state, exit status 75.

The launching process notes the signal and calls the trainer's process, which finishes the step in progress, saves and
raises :class:`Preempted`. Before the first step there is nothing to save, and the run ends at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

#: Exit status of a run that has saved its state and wants to be started again (EX_TEMPFAIL of sysexits.h).
PREEMPTED = 75


class Preempted(Exception):
    """The run ended early because it was warned, and can be continued."""


NOTHING_TO_SAVE = "preempted before the first step: there was nothing to save"
#: Set in the launching process when the signal has come.
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


#: The signal that ended this process's run, if one did: Ray raises a KeyboardInterrupt of its own in place of another.
ENDED_BY: list[signal.Signals] = []


def end_on_signals() -> None:
    """Let SIGTERM, and SIGHUP of a closed terminal, end a run as Ctrl-C does, and note it in :data:`ENDED_BY`.

    Call in the main thread, and again after ``ray.init``, which takes SIGTERM for a handler of its own that prints a
    C++ stack trace.

    Raises:
        KeyboardInterrupt: in the main thread, once, when one of them comes.
    """

    def end(signum: int, _: object) -> None:
        for warning in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(warning, signal.SIG_IGN)  # the end takes a few seconds, and is under way
        ENDED_BY.append(signal.Signals(signum))
        raise KeyboardInterrupt

    for warning in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(warning) is not signal.SIG_IGN:  # nohup
            signal.signal(warning, end)


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
