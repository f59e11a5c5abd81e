"""A limit on the time without progress: a warning, the stacks of all processes in their logs, then the end of the run.

Progress is a new phase in phase.json, a line in progress.log, and within a generation or validation more finished
responses than it has had. A queue that drops its groups and asks for them again makes none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from recipe.runner.faults.errors import Failure
from recipe.runner.faults.phase import FIRST_SYNC, PROGRESS_FILE, Phase, during, read_phase
from recipe.runner.faults.processes import Process, is_stopped
from recipe.runner.faults.stacks import ask_for_stacks

#: The run ends after so many times the limit at which it is warned of.
_END = 1.75
#: Or after so many seconds of the first weight sync, which in verl 0.9.1 may never end.
_FIRST_SYNC_S = 300.0
_FIRST_SYNC_HANGS: Final = (
    ": start the run again, because the first NCCL group of mode=separate_async can wait for ever (verl issue 6967); "
    "for a longer transfer give run.hang_after_s=null"
)
_LOOK_EVERY_S = 1.0
#: Of the time between two looks at most so much counts: this process may have been stopped (Ctrl-Z).
_BETWEEN_S = 5.0


def stopped_of(processes: Iterable[Process]) -> list[Process]:
    """Those that a signal or a debugger has stopped; each of them all is asked for its stacks."""
    processes = list(processes)
    ask_for_stacks(process.pid for process in processes)
    return [process for process in processes if is_stopped(process.pid)]


class HangLimit:
    """Warns of a run that has made no progress for ``after_s`` seconds, and ends it after 1.75 times as long.

    ``say`` is called with the warning. The first weight sync ends it after 300 seconds at most.
    """

    def __init__(self, after_s: float, run_dir: str | Path, say: Callable[[str], None]):
        self._after_s, self._folder, self._say = after_s, Path(run_dir), say
        self._seen: tuple[Phase, int] | None = None
        self._finished, self._moved, self._warning = 0, 0.0, ""
        self._looked = time.monotonic()

    def look(self, stopped: Callable[[], list[Process]]) -> Failure | None:
        """The hang that ends the run; to be called more than once a second. ``stopped`` gives its stopped processes."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return None
        phase = read_phase(self._folder) or Phase(0, "start-up", 0.0)
        is_first = phase.phase == FIRST_SYNC
        after_s = min(self._after_s, _FIRST_SYNC_S / _END) if is_first else self._after_s
        self._moved += max(0.0, now - self._looked - _BETWEEN_S)
        self._looked = now
        if self._has_moved(phase):
            self._moved, self._warning = now, ""
        quiet_s = now - self._moved
        if quiet_s > after_s and not self._warning:
            self._warning = self._diagnose(phase, quiet_s, stopped)
            more = f"The run ends if there is none for {_END * after_s - quiet_s:.0f} s more (run.hang_after_s)"
            self._say(f"warning: {self._warning}. {more}")
        elif quiet_s > _END * after_s:
            remedy = _FIRST_SYNC_HANGS if is_first else ""
            return Failure(f"{self._warning}. It was ended after {quiet_s:.0f} s (run.hang_after_s){remedy}")
        return None

    def _has_moved(self, phase: Phase) -> bool:
        lines = self._folder / PROGRESS_FILE
        seen = replace(phase, queue=""), lines.stat().st_size if lines.exists() else 0
        moved, self._seen = seen != self._seen, seen
        finished = int(phase.queue.partition(" ")[0] or 0)
        more = finished > self._finished
        self._finished = finished if moved else max(finished, self._finished)
        return moved or more

    def _diagnose(self, phase: Phase, quiet_s: float, stopped: Callable[[], list[Process]]) -> str:
        queue = f" ({phase.queue})" if phase.queue else ""
        why = "; ".join(f"{process} is stopped" for process in stopped()) or "no process is stopped"
        return f"no progress for {quiet_s:.0f} s{during(phase)}{queue}: {why}; stacks are in each process's log"
