"""The end of a run before its time: the file ``stop`` in its folder, Ctrl-C, and the signals that end it at once.

Whoever wants a run to save and end writes ``RUN/stop``: a person, a job script, and at a first Ctrl-C this process.
The trainer looks for it where a phase begins (:mod:`recipe.runner.hooks`). It finishes the step in progress, saves and
raises :class:`Preempted`; the exit status is 75, or 130 after Ctrl-C. During the start-up there is nothing to save, and
the launching process ends it (:mod:`recipe.runner.launch.start`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from recipe.runner.faults.phase import read_phase

#: Exit status of a run that has saved its state and wants to be started again (EX_TEMPFAIL of sysexits.h).
PREEMPTED = 75
#: Exit status after Ctrl-C, as shells give it.
INTERRUPTED = 128 + signal.SIGINT
#: In the run folder: the run shall save and end. Its content does not matter.
STOP_FILE: Final = "stop"
#: Environment variable of a job script that does not know the run folder: the path of a file that asks for the same.
STOP_VARIABLE: Final = "FSPO_STOP"
#: Environment variable of a job script that counts starts without a save: the path of a file that each save removes.
UNSAVED_VARIABLE: Final = "FSPO_UNSAVED"
#: SLURM's environment variable: when the job's time limit ends, seconds since 1970.
_END_VARIABLE: Final = "SLURM_JOB_END_TIME"
#: Longer than any job: a time of milliseconds lies behind it. SLURM gives one without a limit a year.
_LONGEST_JOB_S: Final = 10 * 365 * 24 * 3600


class Preempted(Exception):
    """The run ended early because it was asked to, and can be continued."""


NOTHING_TO_SAVE = "preempted before the first step: there was nothing to save"


def ask_to_stop(run_dir: str | Path) -> None:
    """Ask the run in this folder to save and end."""
    Path(run_dir, STOP_FILE).touch()


def stop_request(run_dir: str | Path) -> Path | None:
    """The file that asks the run in this folder to save and end; None if nobody asks."""
    files = (Path(run_dir, STOP_FILE), os.environ.get(STOP_VARIABLE, ""))
    return next((Path(file) for file in files if os.path.isfile(file)), None)


def job_variables() -> dict[str, str]:
    """What this process's environment says of its job; for the trainer, whose Ray may have been started by another."""
    return {name: os.environ.get(name, "") for name in (STOP_VARIABLE, UNSAVED_VARIABLE, _END_VARIABLE)}


def tell_of_save() -> None:
    """Tell the job script that there is a new checkpoint: remove the file that :data:`UNSAVED_VARIABLE` names."""
    with contextlib.suppress(OSError):  # the script then counts a start too many
        os.unlink(os.environ.get(UNSAVED_VARIABLE, ""))


def remove_old_request(run_dir: str | Path) -> bool:
    """Remove a request that came before this process began, which was an earlier start's; whether there was one.

    A request that came since then is for this start, and stays. Its age is read from the clock of the file system,
    which may differ from this machine's.
    """
    path = Path(run_dir, STOP_FILE)
    with contextlib.suppress(FileNotFoundError), tempfile.TemporaryFile(dir=run_dir) as now:
        age_s = os.fstat(now.fileno()).st_mtime - path.lstat().st_mtime
        if age_s > time.time() - psutil.Process().create_time():
            path.unlink()
            return True
    return False


def time_left_s() -> float:
    """Seconds until the time limit of the SLURM job around this process ends; infinite without one.

    A job that ended before this process began is another's: a terminal's environment may outlive its job.
    """
    end = os.environ.get(_END_VARIABLE, "")
    limited = end.isdecimal() and int(end) > psutil.Process().create_time()
    return int(end) - time.time() if limited else float("inf")


def end_note() -> str | None:
    """Why the end of the time limit that the environment names is not obeyed; None if there is none, or it is."""
    end = os.environ.get(_END_VARIABLE, "")
    if end in ("", "UNLIMITED") or (end.isdecimal() and int(end) < time.time() + _LONGEST_JOB_S):
        return None
    return (
        f"{_END_VARIABLE}={end} is not a time in seconds since 1970 that a job could end at, so the run does not save "
        f"before its time limit: export {_END_VARIABLE}=$(($(date +%s) + 24 * 3600))"
    )


#: The signals that end this process's run, the last one for certain: Ray raises a KeyboardInterrupt of its own in place
#: of another. SIGINT is here from the first Ctrl-C on, while the run goes on to its save.
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

    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup
            signal.signal(ending, end)


def _end_by(signum: signal.Signals) -> None:
    for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
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


def stop_on_signals(run_dir: str | Path | None) -> None:
    """Let SIGUSR1 and the next Ctrl-C ask the run in this folder to save and end. Call in the main thread.

    During the start-up they end the launch at once, by a KeyboardInterrupt in the main thread; so they do without a
    folder, whose phase.json may be an earlier start's. The second Ctrl-C ends the run at once, too, as the first does
    where nothing can be written.
    """

    def stop(number: int, _: object) -> None:
        signum = signal.Signals(number)
        phase = read_phase(run_dir) if run_dir else None
        if run_dir is None or phase is None or phase.is_start_up:
            _end_by(signum)
        if signum == signal.SIGINT:
            _on_ctrl_c(lambda *_: _end_by(signum))
            ENDED_BY.append(signum)
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, b"interrupted (Ctrl-C once more ends the run at once): saving after the step in progress\n")
        try:
            ask_to_stop(run_dir)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.write(2, f"error: the run cannot be asked to stop: {error}\n".encode())
            if signum == signal.SIGINT:
                _end_by(signum)

    _on_ctrl_c(stop)
    signal.signal(signal.SIGUSR1, stop)
