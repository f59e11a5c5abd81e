"""A limit on the time without progress: a warning with the stacks of all processes, and then the end of the run.

Progress is what the trainer notes in phase.json (a new phase, and in a generation or validation each response that has
finished) and the lines of the start-up. A step that is merely slow gets the same warning. Defined here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ray

from recipe.runner.faults.errors import Death
from recipe.runner.faults.phase import Phase
from recipe.runner.faults.processes import is_stopped, processes_of, role_of
from recipe.runner.faults.stacks import stacks_of
from recipe.runner.faults.watchdog import other_nodes

#: In the run folder: the stacks of a run that hangs.
HANG_FILE: Final = "hang.txt"
#: The run ends after so many times the limit at which it is warned of.
_END = 1.75
_LOOK_EVERY_S = 1.0
_ELSEWHERE_S = 20.0
#: Before the run folder has a phase.
_BEGINNING = Phase(0, "start-up", 0.0)
_FRAME = re.compile(r"^    (.+) \((.+):(\d+)\)$", re.MULTILINE)
_PACKAGES = [importlib.util.find_spec(name) for name in ("fspo", "ray", "verl", "vllm")]  # may be a checkout each
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    *{str(Path(spec.origin).parent) for spec in _PACKAGES if spec is not None and spec.origin},
    str(Path(__file__).resolve().parents[2]),
    "<",  # no file
)


@dataclass(frozen=True)
class Look:
    """What is seen of one process.

    Attributes:
        process: Its role, number and node, for a sentence.
        stopped: Whether a signal or a debugger has stopped it.
        code: ``FUNCTION (FILE:LINE)`` of the innermost frame that is in code of no library: a reward function, say.
        stacks: Of all its threads.
    """

    process: str
    stopped: bool
    code: str | None
    stacks: str

    def words(self) -> str:
        """For a sentence."""
        return f"{self.process} is {'stopped' if self.stopped else f'in {self.code}' if self.code else 'in a library'}"


@dataclass(frozen=True)
class HangWatch:
    """A thread of the launching process.

    Attributes:
        run_id: Of the run.
        run_dir: Where the stacks are written, as ``hang.txt``.
        after_s: The limit, in seconds.
        phase: Tells what the run is doing.
        lines: How many lines the run has printed.
        say: Called with a warning.
        report: Called with the hang that ends the run.
        over: Set once the run is over.
    """

    run_id: str
    run_dir: Path
    after_s: float
    phase: Callable[[], Phase | None]
    lines: Callable[[], int]
    say: Callable[[str], None]
    report: Callable[[Death], None]
    over: threading.Event

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, daemon=True, name="hang watch").start()

    def _run(self) -> None:
        last: tuple[Phase, int] | None = None
        # The looks are counted: the clock goes on while this process is stopped (Ctrl-Z).
        waited, warning = 0.0, ""
        while not self.over.wait(_LOOK_EVERY_S):
            waited += _LOOK_EVERY_S
            phase = self.phase() or _BEGINNING
            if (signs := (phase, self.lines())) != last:
                if warning:
                    self.say(f"note: the run goes on, after {waited:.0f} s without progress")
                last, waited, warning = signs, 0.0, ""
            elif waited > self.after_s and not warning:
                warning = self._diagnose(phase, waited)
                more = f"The run ends if there is none for {_END * self.after_s - waited:.0f} s more (run.hang_after_s)"
                self.say(f"warning: {warning}. {more}")
            elif waited > _END * self.after_s:
                told = f"{warning}. It was ended after {waited:.0f} s (run.hang_after_s)"
                self.report(Death("", None, None, phase, told=told))
                return

    def _diagnose(self, phase: Phase, waited: float) -> str:
        """Write the stacks of all processes, and say in one sentence which are stopped, or else in code of the user."""
        queue = f" ({phase.queue})" if phase.queue else ""
        what = f"no progress for {waited:.0f} s {phase.words()}{queue}"
        why = "nothing is known of its processes"
        try:
            looks = [*looks_here(self.run_id), *looks_elsewhere(self.run_id)]
            named = [look for look in looks if look.stopped] or [look for look in looks if look.code]
            why = "; ".join(look.words() for look in named) or "every process is in a library"
            file = self.run_dir / HANG_FILE
            stacks = "\n".join(f"{look.words()}\n{look.stacks}" for look in looks)
            file.write_text(f"{time.strftime('%F %T')}, {waited:.0f} s without progress\n\n{stacks}")
        except Exception as error:  # whatever it is, a full disk for one: the run must end
            return f"{what}: {why} ({error!r})"
        return f"{what}: {why}; stacks of all processes: {file}"


def looks_here(run_id: str, node: str | None = None) -> list[Look]:
    """Of each process of the run on this machine."""
    looks = []
    for pid in processes_of(run_id):
        if (role := role_of(pid)) is not None:
            stacks, there = stacks_of(pid), f" on {node}" if node else ""
            frames = (match for match in _FRAME.finditer(stacks) if not match[2].startswith(_LIBRARIES))
            code = next((f"{match[1]} ({Path(match[2]).name}:{match[3]})" for match in frames), None)
            looks.append(Look(f"the {role} (process {pid}{there})", is_stopped(pid), code, stacks))
    return looks


def looks_elsewhere(run_id: str) -> list[Look]:
    """The same on the run's other nodes; a node that does not answer is left out."""
    looks: list[Look] = []
    if not ray.is_initialized():
        return looks

    def ask() -> None:
        with contextlib.suppress(Exception):
            task = ray.remote(num_cpus=0)(looks_here)
            answers = [task.options(scheduling_strategy=node).remote(run_id, name) for name, node in other_nodes()]
            for answer in ray.wait(answers, num_returns=len(answers), timeout=_ELSEWHERE_S)[0]:
                looks.extend(ray.get(answer))

    # Ray may be what hangs: some of its calls take no time limit.
    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    asks.join(2 * _ELSEWHERE_S)
    return list(looks)
