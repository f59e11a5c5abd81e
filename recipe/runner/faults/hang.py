"""Notices that a run makes no progress, says what each of its processes is doing, and ends it as a death would.

Progress is what the trainer notes in phase.json (a new phase, and in a generation or validation each response that has
finished) and the lines of the start-up. The process that is named is a guess: a step that is merely slow gets the same
warning. Defined here.
"""

from __future__ import annotations

import contextlib
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from recipe.runner.faults.errors import Death
from recipe.runner.faults.phase import Phase
from recipe.runner.faults.processes import FSDP_WORKER, is_stopped, processes_of, role_of
from recipe.runner.faults.stacks import HANG_FILE, Thread, place, stacks_of
from recipe.runner.faults.watchdog import other_nodes

#: The limit of a phase: six times its longest wait in the last five steps, so that one with responses ten times as long
#: does not end the run.
_TIMES, _STEPS = 6, 5
#: After so many steps of a phase half of ``after_s`` is enough.
_KNOWN = 3
#: The run ends after so many times the limit at which it is warned of.
_END = 1.75
_LOOK_EVERY_S = 1.0
_ELSEWHERE_S = 20.0
#: Before the run folder has a phase.
_BEGINNING = Phase(0, "start-up", 0.0)
_SAMPLES = 5
#: Where a thread that waits usually is; this recipe has some, too.
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).resolve().parents[2]),
)


@dataclass(frozen=True)
class Doing:
    """What one process of the run is doing.

    Attributes:
        role: What it is for the run.
        pid: Its number.
        node: Where, if it is not this machine.
        state: ``stopped``, ``busy`` (wanted a core most of a second) or ``waits``.
        where: ``function (file:line)`` of the thread that tells most.
        own: Whether that is code of no library: a reward function, say.
        stacks: Of all threads.
    """

    role: str
    pid: int
    node: str | None
    state: str
    where: str
    own: bool
    stacks: str

    def words(self) -> str:
        """For a sentence."""
        there = f" on {self.node}" if self.node else ""
        doing = {"stopped": "is stopped", "busy": f"is busy in {self.where}", "waits": f"is in {self.where}"}
        return f"the {self.role} (process {self.pid}{there}) {doing[self.state]}"


class Patience:
    """How long a phase may go without progress: ``after_s``, half of it once three steps are known, or six times the
    longest it has gone in its last five steps, if that is more. What was slow once (a first step that compiles, a file
    system) does not count for ever."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._longest_s: dict[str, dict[int, float]] = {}  # by phase and step

    def measured(self, phase: Phase, seconds: float) -> None:
        """Take in how long a phase went without progress before it made some."""
        steps = self._longest_s.setdefault(phase.phase, {})
        steps[phase.step] = max(seconds, steps.get(phase.step, 0.0))
        if len(steps) > _STEPS:
            del steps[min(steps)]

    def limit_s(self, phase: str) -> float:
        """Seconds after which it is warned of."""
        waits = self._longest_s.get(phase, {}).values()
        return max(self._after_s / (2 if len(waits) >= _KNOWN else 1), _TIMES * max(waits, default=0.0))


@dataclass(frozen=True)
class HangWatch:
    """A thread of the launching process.

    Attributes:
        run_id: Of the run.
        run_dir: Where the stacks are written, as ``hang.txt``.
        after_s: The shortest limit, in seconds.
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
        patience = Patience(self.after_s)
        last: tuple[Phase, int] | None = None
        # The looks are counted: the clock goes on while this process is stopped (Ctrl-Z) or the machine sleeps.
        waited, warning = 0.0, ""
        while not self.over.wait(_LOOK_EVERY_S):
            waited += _LOOK_EVERY_S
            phase = self.phase() or _BEGINNING
            if (signs := (phase, self.lines())) != last:
                if last is not None:
                    patience.measured(last[0], waited)
                if warning:
                    self.say(f"note: the run goes on, after {waited:.0f} s without progress")
                last, waited, warning = signs, 0.0, ""
                continue
            limit = patience.limit_s(phase.phase)
            if waited > limit and not warning:
                warning = self._diagnose(phase, waited)
                more = f"The run ends if there is none for {_END * limit - waited:.0f} s more (run.hang_after_s)"
                self.say(f"warning: {warning}. {more}")
            elif waited > _END * limit:
                told = f"{warning}. It was ended after {waited:.0f} s (run.hang_after_s)"
                self.report(Death("", None, None, phase, told=told))
                return

    def _diagnose(self, phase: Phase, waited: float) -> str:
        """Look at all processes, write their stacks, and say in one sentence which of them explains it."""
        queue = f" ({phase.queue})" if phase.queue else ""
        what = f"no progress for {waited:.0f} s {phase.words()}{queue}"
        why = "nothing is known of its processes"
        try:
            processes = [*doing_here(self.run_id), *doing_elsewhere(self.run_id)]
            why = "; ".join(doing.words() for doing in suspects(processes)[:3]) or "every process waits for another"
            stacks = "\n".join(f"{doing.words()}\n{doing.stacks}" for doing in processes)
            file = self.run_dir / HANG_FILE
            file.write_text(f"{time.strftime('%F %T')}, {waited:.0f} s without progress\n\n{stacks}")
        except Exception as error:  # whatever it is, a full disk for one: the run must end
            return f"{what}: {why} ({error!r})"
        return f"{what}: {why}; stacks of all processes: {file}"


def doing_here(run_id: str, node: str | None = None) -> list[Doing]:
    """What each process of the run on this machine is doing."""
    roles = {pid: role for pid in processes_of(run_id) if (role := role_of(pid)) is not None}
    wanted: Counter[int] = Counter()
    for _ in range(_SAMPLES):
        wanted.update(pid for pid in roles if _wants_to_run(pid))
        time.sleep(0.2)
    doing = []
    for pid, role in roles.items():
        state = "stopped" if is_stopped(pid) else "busy" if 2 * wanted[pid] > _SAMPLES else "waits"
        threads, stacks = stacks_of(pid)
        frame = min(threads, key=_order)["frames"][0] if threads else None
        where, own = (place(frame), _is_own(frame)) if frame else ("code that cannot be seen", False)
        doing.append(Doing(role, pid, node, state, where, own, stacks))
    return doing


def _wants_to_run(pid: int) -> bool:
    """Whether a thread of the process runs, or would on an idle machine."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(") ")[2].startswith("R"):
                return True
    return False


def _order(thread: Thread) -> tuple[bool, bool, bool, bool]:
    """First the thread in code of no library, then the one with Python's lock, then the one that executes a call of
    Ray (of an actor with asynchronous methods not the main one, which waits for messages), then the main one."""
    called = any(frame["filename"].endswith("ray/_private/function_manager.py") for frame in thread["frames"])
    own, locks = _is_own(thread["frames"][0]), thread["owns_gil"]
    return not own, not locks, not called, thread["thread_name"] != "MainThread"


def _is_own(frame: dict[str, Any]) -> bool:
    file = frame["filename"]
    return not (file.startswith("<") or "/ray/" in file or any(file.startswith(folder) for folder in _LIBRARIES))


def suspects(processes: Sequence[Doing]) -> list[Doing]:
    """The processes that explain a hang: those that are stopped; else in code of no library; else busy; else a rank
    that is elsewhere than the other ranks. Of two ranks in two places nobody knows which is wrong: both are named."""
    places = [doing.where for doing in processes if doing.role == FSDP_WORKER]
    usual = max(places, key=places.count, default=None) if len(set(places)) < len(places) else None
    for explains in (
        lambda doing: doing.state == "stopped",
        lambda doing: doing.own,
        lambda doing: doing.state == "busy",
        lambda doing: doing.role == FSDP_WORKER and len(places) > 1 and doing.where != usual,
    ):
        if named := [doing for doing in processes if explains(doing)]:
            return named
    return []


def doing_elsewhere(run_id: str) -> list[Doing]:
    """The same on the run's other nodes; a node that does not answer is left out."""
    if not ray.is_initialized():
        return []
    doing: list[Doing] = []

    def look() -> None:
        with contextlib.suppress(Exception):
            ask = ray.remote(num_cpus=0)(doing_here)
            answers = [ask.options(scheduling_strategy=there).remote(run_id, name) for name, there in other_nodes()]
            for answer in ray.wait(answers, num_returns=len(answers), timeout=_ELSEWHERE_S)[0]:
                doing.extend(ray.get(answer))

    # Ray may be what hangs: some of its calls take no time limit.
    looks = threading.Thread(target=look, daemon=True)
    looks.start()
    looks.join(2 * _ELSEWHERE_S)
    return list(doing)
