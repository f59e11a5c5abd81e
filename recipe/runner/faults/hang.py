"""A limit on the time without progress: a warning, the stacks of all processes in their logs, then the end of the run.

Progress is what the trainer writes into phase.json (a new phase, and in a generation or validation each response that
has finished) and into progress.log; the times of both files tell. A step that is merely slow gets the same warning.
Defined here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from recipe.runner.faults.errors import Failure
from recipe.runner.faults.phase import FIRST_SYNC, PHASE_FILE, PROGRESS_FILE, Phase, read_phase
from recipe.runner.faults.processes import Process, is_stopped
from recipe.runner.faults.stacks import ask_for_stacks

#: The run ends after so many times the limit at which it is warned of.
_END = 1.75
#: Or after so many seconds of the first weight sync, which takes seconds, and in verl 0.9.1 may never end.
_FIRST_SYNC_S = 300.0
_FIRST_SYNC_HANGS: Final = (
    "start the run again, because the first NCCL group of mode=separate_async can wait for ever (verl issue 6967); "
    "for a longer transfer give run.hang_after_s=null"
)
_LOOK_EVERY_S = 1.0
#: Of the time between two looks at most so much counts: this process may have been stopped (Ctrl-Z).
_BETWEEN_S = 5.0
#: Before the run folder has a phase.
_BEGINNING = Phase(0, "start-up", 0.0)


@dataclass(frozen=True)
class Snapshot:
    """State of one process.

    Attributes:
        process: Which.
        stopped: Whether a signal or a debugger has stopped it.
    """

    process: Process
    stopped: bool

    def __str__(self) -> str:
        return f"{self.process} is stopped" if self.stopped else str(self.process)


def snapshots_of(processes: Iterable[Process]) -> list[Snapshot]:
    """Of each of these processes of this machine, which are asked for their stacks, too."""
    processes = list(processes)
    ask_for_stacks(process.pid for process in processes)
    return [Snapshot(process, is_stopped(process.pid)) for process in processes]


def _written(path: Path) -> int:
    """When a file was written last, in nanoseconds since 1970; 0 if it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


class HangLimit:
    """Warns of a run that has made no progress for ``after_s`` seconds, and ends it after 1.75 times as long.

    The first weight sync (:data:`recipe.runner.faults.phase.FIRST_SYNC`) ends it after 300 seconds at most.

    Args:
        after_s: The limit, in seconds.
        run_dir: Of the run.
        say: Called with a warning.
    """

    def __init__(self, after_s: float, run_dir: str | Path, say: Callable[[str], None]):
        self._after_s, self._folder, self._say = after_s, Path(run_dir), say
        self._signs: list[int] | None = None
        self._looked, self._quiet_s, self._warning = time.monotonic(), 0.0, ""

    def look(self, snapshots: Callable[[], list[Snapshot]]) -> Failure | None:
        """The hang that ends the run; to be called more than once a second, which is how often it looks."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return None
        self._quiet_s += min(now - self._looked, _BETWEEN_S)
        self._looked, quiet_s = now, self._quiet_s
        phase = read_phase(self._folder) or _BEGINNING
        is_first = phase.phase == FIRST_SYNC
        after_s = min(self._after_s, _FIRST_SYNC_S / _END) if is_first else self._after_s
        if (signs := [_written(self._folder / name) for name in (PHASE_FILE, PROGRESS_FILE)]) != self._signs:
            if self._warning:
                self._say(f"note: the run goes on, after {quiet_s:.0f} s without progress")
            self._signs, self._quiet_s, self._warning = signs, 0.0, ""
        elif quiet_s > after_s and not self._warning:
            self._warning = self._diagnose(phase, quiet_s, snapshots)
            more = f"The run ends if there is none for {_END * after_s - quiet_s:.0f} s more (run.hang_after_s)"
            self._say(f"warning: {self._warning}. {more}")
        elif quiet_s > _END * after_s:
            remedy = f": {_FIRST_SYNC_HANGS}" if is_first else ""
            return Failure(f"{self._warning}. It was ended after {quiet_s:.0f} s (run.hang_after_s){remedy}")
        return None

    def _diagnose(self, phase: Phase, quiet_s: float, snapshots: Callable[[], list[Snapshot]]) -> str:
        """Ask all processes for their stacks, and say in one sentence which are stopped."""
        queue = f" ({phase.queue})" if phase.queue else ""
        what = f"no progress for {quiet_s:.0f} s {phase.words()}{queue}"
        why = "nothing is known of its processes"
        try:
            seen = snapshots()
            why = "; ".join(str(snapshot) for snapshot in seen if snapshot.stopped) or "no process is stopped"
        except Exception as error:  # whatever it is: the run must end
            return f"{what}: {why} ({error!r})"
        return f"{what}: {why}; each process has written its stacks to its log"
