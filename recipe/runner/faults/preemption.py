"""The warning before a cluster takes a machine back: SIGUSR1 to the launching process, saved state, exit status 75.

The launching process notes the signal and calls the trainer's process, which finishes the step in progress, saves and
raises :class:`Preempted`. Before the first step there is nothing to save, and the run ends at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

#: Exit status of a run that has saved its state and wants to be started again (EX_TEMPFAIL of sysexits.h).
PREEMPTED = 75
#: Seconds between the warning and the end, as the job script asked SLURM for (``--signal=B:USR1@...``).
LEAD_VARIABLE = "FSPO_WARNING_LEAD_S"


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
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # the end takes a few seconds, and is under way
        ENDED_BY.append(signal.Signals(signum))
        raise KeyboardInterrupt

    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup
            signal.signal(each, end)


@dataclass
class LeadTime:
    """Compares the seconds between warning and end with what the run needs: the rest of a step, and a save.

    Attributes:
        lead_s: Seconds between the warning and the end; None where nobody warns.
        step_s: The longest step so far, without its save.
        validation_s: The longest validation so far; a warning waits for its end as well.
        save_s: The longest save so far.
    """

    lead_s: float | None
    step_s: float = 0.0
    validation_s: float = 0.0
    save_s: float = 0.0
    _said_s: float = 0.0

    @classmethod
    def from_environment(cls) -> LeadTime:
        """The lead that the job script exports as FSPO_WARNING_LEAD_S.

        Raises:
            ValueError: if it is not a number.
        """
        text = os.environ.get(LEAD_VARIABLE, "").strip()
        try:
            return cls(float(text) if text else None)
        except ValueError:
            raise ValueError(f"{LEAD_VARIABLE}={text!r} is not a number of seconds") from None

    def measured(self, *, step_s: float = 0.0, validation_s: float = 0.0, save_s: float = 0.0) -> None:
        """Take in what was measured."""
        self.step_s = max(self.step_s, step_s)
        self.validation_s = max(self.validation_s, validation_s)
        self.save_s = max(self.save_s, save_s)

    def shortfall(self) -> str | None:
        """A sentence if the lead is too short for a warning at the worst moment; again only after the need has grown
        by a tenth."""
        needed_s = max(self.step_s, self.validation_s) + self.save_s
        if self.lead_s is None or needed_s <= self.lead_s or needed_s < 1.1 * self._said_s:
            return None
        self._said_s = needed_s
        return (
            f"warning: the job is warned {self.lead_s:.0f} s before its end, but a step takes up to {self.step_s:.0f} "
            f"s, a validation {self.validation_s:.0f} s and a save {self.save_s:.0f} s: a preempted run would lose its "
            f"work since the last save. Submit with --signal=B:USR1@{1.5 * needed_s:.0f} and {LEAD_VARIABLE} set to "
            "the same, or save more often (trainer.save_freq)"
        )


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
