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
        where: ``function (file:line)`` of the thread that tells most; None if it cannot be seen.
        own: Whether that is code of no library: a reward function, say.
        stacks: Of all threads.
    """

    role: str
    pid: int
    node: str | None
    state: str
    where: str | None
    own: bool
    stacks: str

    def words(self) -> str:
        """For a sentence."""
        there = f" on {self.node}" if self.node else ""
        doing = {"stopped": "is stopped", "busy": "is busy in ", "waits": "is in "}[self.state]
        if self.state != "stopped":
            doing += self.where or "code that cannot be seen"
        return f"the {self.role} (process {self.pid}{there}) {doing}"


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


class HangWatch(threading.Thread):
    """A thread of the launching process.

    Args:
        run_id: Of the run.
        run_dir: Where the stacks are written, as ``hang.txt``.
        after_s: The shortest limit, in seconds.
        phase: Tells what the run is doing.
        lines: How many lines the run has printed.
        say: Called with a warning.
        report: Called with the hang that ends the run.
        over: Set once the run is over.
    """

    def __init__(
        self,
        run_id: str,
        run_dir: Path,
        after_s: float,
        phase: Callable[[], Phase | None],
        lines: Callable[[], int],
        say: Callable[[str], None],
        report: Callable[[Death], None],
        over: threading.Event,
    ) -> None:
        super().__init__(daemon=True, name="hang watch")
        self._run_id, self._file, self._patience = run_id, run_dir / HANG_FILE, Patience(after_s)
        self._phase, self._lines, self._say, self._report, self._over = phase, lines, say, report, over

    def run(self) -> None:
        last: tuple[Phase, int] | None = None
        waited, warning, looked = 0.0, "", time.monotonic()
        while not self._over.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            # This process may have been stopped itself (Ctrl-Z), or the machine asleep.
            waited += min(now - looked, 10 * _LOOK_EVERY_S)
            looked = now
            phase = self._phase() or _BEGINNING
            if (signs := (phase, self._lines())) != last:
                if last is not None:
                    self._patience.measured(last[0], waited)
                if warning:
                    self._say(f"note: the run goes on, after {waited:.0f} s without progress")
                last, waited, warning = signs, 0.0, ""
                continue
            limit = self._patience.limit_s(phase.phase)
            if waited > limit and not warning:
                warning = self._diagnose(phase, waited)
                more = f"The run ends if there is none for {_END * limit - waited:.0f} s more (run.hang_after_s)"
                self._say(f"warning: {warning}. {more}")
            elif waited > _END * limit:
                told = f"{warning}. It was ended after {waited:.0f} s (run.hang_after_s)"
                self._report(Death("", None, None, phase, told=told))
                return

    def _diagnose(self, phase: Phase, waited: float) -> str:
        """Look at all processes, write their stacks, and say in one sentence which of them explains it."""
        queue = f" ({phase.queue})" if phase.queue else ""
        what = f"no progress for {waited:.0f} s {phase.words()}{queue}"
        try:
            processes = [*doing_here(self._run_id), *doing_elsewhere(self._run_id)]
        except Exception as error:  # whatever it is: the run must end
            return f"{what}: its processes could not be looked at ({error!r})"
        why = "; ".join(doing.words() for doing in suspects(processes)[:3]) or "every process waits for another"
        text = [f"{doing.words()}\n{doing.stacks}" for doing in processes]
        try:
            self._file.write_text(f"{time.strftime('%F %T')}, {waited:.0f} s without progress\n\n" + "\n".join(text))
        except OSError as error:
            return f"{what}: {why}; the stacks could not be written ({error})"
        return f"{what}: {why}; stacks of all processes: {self._file}"


def doing_here(run_id: str, node: str | None = None) -> list[Doing]:
    """What each process of the run on this machine is doing."""
    roles = {pid: role for pid in processes_of(run_id) if (role := role_of(pid)) is not None}
    wanted: Counter[int] = Counter()
    for _ in range(_SAMPLES):
        wanted.update(pid for pid in roles if _wants_to_run(pid))
        time.sleep(0.2)
    return [_doing(pid, role, 2 * wanted[pid] > _SAMPLES, node) for pid, role in roles.items()]


def _wants_to_run(pid: int) -> bool:
    """Whether a thread of the process runs, or would on an idle machine."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(") ")[2].startswith("R"):
                return True
    return False


def _doing(pid: int, role: str, busy: bool, node: str | None) -> Doing:
    threads, stacks = stacks_of(pid)
    telling = min(threads, key=_order, default=None)
    frame = telling["frames"][0] if telling else None
    return Doing(
        role=role,
        pid=pid,
        node=node,
        state="stopped" if is_stopped(pid) else "busy" if busy else "waits",
        where=place(frame) if frame else None,
        own=frame is not None and _is_own(frame),
        stacks=stacks,
    )


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
    answers: list[Doing] = []

    def look() -> None:
        with contextlib.suppress(Exception):
            answers.extend(_ask_nodes(run_id))

    # Ray may be what hangs: some of its calls take no time limit.
    looks = threading.Thread(target=look, daemon=True)
    looks.start()
    looks.join(2 * _ELSEWHERE_S)
    return list(answers)


def _ask_nodes(run_id: str) -> list[Doing]:
    if not ray.is_initialized():
        return []
    look = ray.remote(num_cpus=0)(doing_here)
    answers = [look.options(scheduling_strategy=there).remote(run_id, name) for name, there in other_nodes()]
    ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_ELSEWHERE_S) if answers else ([], [])
    return [doing for answer in ready for doing in ray.get(answer)]
