"""The end of a run before its time: the file ``stop`` in its folder, and signals.

Whoever wants a run to save and end writes ``RUN/stop``: a person, and this process at a first signal. The trainer looks
for it where a phase begins (:mod:`recipe.runner.hooks`), finishes the step in progress, saves and raises
:class:`Preempted`; the exit status is 75, or 130 after Ctrl-C. Before the first step there is nothing to save, and the
launching process ends at once, with the same status. A second signal N ends it at once, with 128 + N.

The signals are blocked, and one thread waits for them, because ``ray.init`` replaces handlers. What this process starts
inherits the block: SLURM sends a signal to every process of a step, and Ray's must go on until the save is done.

``python -m recipe.runner.faults.preemption COMMAND...`` runs a command with the signals blocked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final, NoReturn

import psutil

from recipe.runner.faults.phase import read_phase, say
from recipe.runner.faults.processes import kill

#: Exit status of a run that failed, and would fail again.
FAILED: Final = 1
#: Exit status of a run that is worth another start (EX_TEMPFAIL of sysexits.h).
PREEMPTED = 75
#: Exit status after Ctrl-C, as shells give it.
INTERRUPTED = 128 + signal.SIGINT
#: In the run folder: the run shall save and end.
STOP_FILE: Final = "stop"
#: Environment variable of a job script that does not know the run folder: the path of a file that asks for the same.
STOP_VARIABLE: Final = "FSPO_STOP"
#: The same, of a job script that counts starts without a save: the path of a file that each save removes.
UNSAVED_VARIABLE: Final = "FSPO_UNSAVED"
#: SLURM's: when the job's time limit ends, seconds since 1970.
_END_VARIABLE: Final = "SLURM_JOB_END_TIME"
#: What the environment says of a job, for a trainer whose Ray another may have started.
JOB_VARIABLES: Final = (STOP_VARIABLE, UNSAVED_VARIABLE, _END_VARIABLE)


#: What there is to say of a run that ended so early.
NOTHING_SAVED: Final = "before the end of the first step: nothing saved"


class Preempted(Exception):
    """The run ended early because it was asked to, and can be continued."""


def stop_request(run_dir: str | Path) -> Path | None:
    """The file that asks the run in this folder to save and end; None if nobody asks."""
    files = (Path(run_dir, STOP_FILE), os.environ.get(STOP_VARIABLE, ""))
    return next((Path(file) for file in files if os.path.isfile(file)), None)


def remove_old_request(run_dir: str | Path) -> bool:
    """Remove a request that is older than this process, so of an earlier start; whether there was one."""
    path = Path(run_dir, STOP_FILE)
    is_old = path.is_file() and path.stat().st_mtime < psutil.Process().create_time()
    if is_old:
        path.unlink()
    return is_old


def time_left_s() -> float:
    """Seconds until the time limit of the SLURM job around this process ends; infinite without one."""
    end = os.environ.get(_END_VARIABLE, "")
    # A job that ended before this process began is another's: a terminal's environment may outlive its job.
    limited = end.isdecimal() and int(end) > psutil.Process().create_time()
    return int(end) - time.time() if limited else float("inf")


#: What asks a run to save and end.
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
#: Signals within so many seconds are one: SLURM sends TERM twice, 5 ms apart, to what it preempts without a grace time.
_ONE_SIGNAL_S: Final = 1.0


def keep_blocked() -> None:
    """Keep ``multiprocessing`` from unblocking SIGINT and SIGTERM in the thread that starts its resource tracker."""
    resource_tracker._HAVE_SIGMASK = False  # type: ignore[attr-defined]


def take_signals(act: Callable[[signal.Signals], None]) -> None:
    """Block the signals, but those that are ignored (below nohup, for one), and call ``act`` with each, in a thread.

    To be called before any other thread is started, which would not have them blocked.
    """
    blocked = {signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    keep_blocked()

    def wait() -> None:
        last = -_ONE_SIGNAL_S
        while True:
            signum = signal.Signals(signal.sigwait(blocked))
            if time.monotonic() - last >= _ONE_SIGNAL_S:
                last = time.monotonic()
                act(signum)

    threading.Thread(target=wait, daemon=True, name="signals").start()


def status_of(signals: list[signal.Signals]) -> int:
    """Exit status of what was ended by these signals, in the order in which they came."""
    if len(signals) > 1:
        return 128 + signals[-1]
    return INTERRUPTED if signals == [signal.SIGINT] else PREEMPTED


class Ending:
    """What a signal does in the launching process of a run."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []  #: Those that came.
        self.run_dir: str | None = None  #: Of the run, once its phase.json is of this start.
        self.folder: Path | None = None  #: Of the run's private files, which go with it.
        self.how_far: Callable[[], str] = lambda: NOTHING_SAVED  #: What the run has done, the end of the last words.
        self.let_go: Callable[[], None] = self._end_children  #: Called before the end at once.

    def take(self, signum: signal.Signals) -> None:
        """Ask the run to save and end; end it at once if there is nothing to save, or this is a second signal."""
        self.signals.append(signum)
        phase = read_phase(self.run_dir) if self.run_dir else None
        if not self.run_dir or phase is None or phase.is_start_up or len(self.signals) > 1:
            self.leave()
        try:
            Path(self.run_dir, STOP_FILE).touch()
        except OSError as error:
            say(f"error: the run cannot be asked to save: {error}", sys.stderr)
            self.leave()
        say(f"{self.why()}: saving after the step in progress; another signal ends the run at once", sys.stderr)

    def why(self) -> str:
        return "interrupted" if self.signals[-1:] == [signal.SIGINT] else f"ended by {self.signals[-1].name}"

    def leave(self) -> NoReturn:
        """End this process at once."""
        with contextlib.suppress(Exception):  # it ends, whatever keeps it from saying so
            say(f"{self.why()} {self.how_far()}", sys.stderr)
            self.let_go()
        os._exit(status_of(self.signals))

    def _end_children(self) -> None:
        kill([child.pid for child in psutil.Process().children(recursive=True)])
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


#: Of this process.
ENDING: Final = Ending()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.execvp(sys.argv[1], sys.argv[1:])
