"""Notices that a run makes no progress, says what each of its processes is doing, and ends it as a death would.

Progress is what the trainer notes in phase.json (a new phase, and in a generation or validation each response that has
finished) and the lines of the start-up. Nothing is concluded from the state of a process: a loop that holds Python's
lock looks busy, and a rank that left out a collective makes all others wait. Defined here.
"""

from __future__ import annotations

import contextlib
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.runner.faults.collectives import Entered, ask, missing
from recipe.runner.faults.phase import Phase
from recipe.runner.faults.processes import FSDP_WORKER, is_stopped, processes_of, role_of
from recipe.runner.faults.stacks import Thread, threads_of
from recipe.runner.faults.watchdog import Death

HANG_FILE = "hang.txt"
#: The limit of a phase: six times its longest wait in the last five steps, so that one with responses ten times as long
#: does not end the run.
_TIMES, _STEPS = 6, 5
#: So many steps of a phase tell how long it takes: half of ``after_s`` is enough then.
_KNOWN = 3
#: The run ends after so many times the limit at which it is warned of.
_END = 1.75
_LOOK_EVERY_S = 1.0
#: The least share of a second that counts where other programs take the machine.
_LEAST_SHARE = 0.2
_ELSEWHERE_S = 20.0
#: Before the run folder tells a phase.
_BEGINNING = Phase(0, "start-up", 0.0)
_SAMPLES = 5
#: Where a thread that waits usually is; this recipe has some, too.
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).resolve().parents[2]),
)


@dataclass(frozen=True)
class Hang(Death):
    """A run without progress; ``told`` is the sentence."""

    told: str = ""

    def sentence(self) -> str:
        return self.told


def stopped_one(run_id: str, phase: Phase | None) -> Hang | None:
    """A stopped process of the run here, which explains an error of Ray that came before a limit."""
    for pid in filter(is_stopped, processes_of(run_id)):
        if (role := role_of(pid)) is not None:
            when = f" {phase.words()}" if phase else ""
            return Hang(
                "", None, None, phase, told=f"the {role} (process {pid}) is stopped, so that the run failed{when}"
            )
    return None


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
        entered: Of an FSDP worker: its rank, and the collectives that it has entered.
        missing: What is said of a rank for which others wait in a collective.
    """

    role: str
    pid: int
    node: str | None
    state: str
    where: str | None
    own: bool
    stacks: str
    entered: tuple[int, Entered] | None = None
    missing: str | None = None

    def words(self) -> str:
        """For a sentence."""
        there = f" on {self.node}" if self.node else ""
        place = "is stopped" if self.state == "stopped" else f"{'is busy' if self.state == 'busy' else 'is'} in "
        if self.state != "stopped":
            place += self.where or "code that cannot be seen"
        rank = f"rank {self.entered[0]}, " if self.entered and self.missing else ""
        return f"{rank}the {self.role} (process {self.pid}{there}) {self.missing or place}"


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
        report: Callable[[Hang], None],
        over: threading.Event,
    ) -> None:
        super().__init__(daemon=True, name="hang watch")
        self._run_id, self._file, self._patience = run_id, run_dir / HANG_FILE, Patience(after_s)
        self._phase, self._lines, self._say, self._report, self._over = phase, lines, say, report, over

    def run(self) -> None:
        last: tuple[Phase, int] | None = None
        waited, warned, share, since = 0.0, "", Share(self._run_id), time.monotonic()
        looked = since
        while not self._over.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            # This process may have been stopped itself (Ctrl-Z), or the machine asleep.
            waited += min(now - looked, 10 * _LOOK_EVERY_S) * share.ours()
            looked = now
            phase = self._phase() or _BEGINNING
            if (signs := (phase, self._lines())) != last:
                if last is not None:
                    self._patience.measured(last[0], waited)
                if warned:
                    self._say(f"note: the run goes on, after {now - since:.0f} s without progress")
                last, waited, warned, since = signs, 0.0, "", now
                continue
            limit = self._patience.limit_s(phase.phase)
            if waited > limit and not warned:
                warned = self._diagnose(phase, now - since)
                more = f"The run ends if there is none for {_END * limit - waited:.0f} s more (fspo.hang_after_s)"
                self._say(f"warning: {warned}. {more}")
            elif waited > _END * limit:
                told = f"{warned}. It was ended after {now - since:.0f} s (fspo.hang_after_s)"
                self._report(Hang("", None, None, phase, told=told))
                return

    def _diagnose(self, phase: Phase, waited: float) -> str:
        """Look at all processes, write their stacks, and say in one sentence which of them explains it."""
        queue = f" ({phase.queue})" if phase.queue else ""
        told = f"no progress for {waited:.0f} s {phase.words()}{queue}"
        try:
            found = [*doing_here(self._run_id), *doing_elsewhere(self._run_id)]
        except Exception as error:  # whatever it is: the run must end
            return f"{told}: its processes could not be looked at ({error!r})"
        why = "; ".join(doing.words() for doing in suspects(found)[:3]) or "every process waits for another"
        text = [f"{doing.words()}\n{doing.stacks}" for doing in found]
        try:
            self._file.write_text(f"{time.strftime('%F %T')}, {waited:.0f} s without progress\n\n" + "\n".join(text))
        except OSError as error:
            return f"{told}: {why}; the stacks could not be written ({error})"
        return f"{told}: {why}; stacks of all processes: {self._file}"


class Share:
    """Which part of the machine other programs leave to the run, between two calls: 1 on a machine of its own."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._foreign: set[int] = set()
        self._last = self._measure()

    def _measure(self) -> tuple[float, float, dict[int, float]]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        own = {pid: _cpu_s(pid) for pid in [psutil.Process().pid, *processes_of(self._run_id, self._foreign)]}
        return sum(times[:8]), idle, own

    def ours(self) -> float:
        """Between 0.2 and 1."""
        (total, idle, own), self._last = self._last, self._measure()
        all_s = self._last[0] - total
        others = all_s - (self._last[1] - idle) - sum(max(0.0, s - own.get(pid, s)) for pid, s in self._last[2].items())
        return min(1.0, max(_LEAST_SHARE, 1.0 - others / all_s)) if all_s > 0 else 1.0


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def doing_here(run_id: str, node: str | None = None) -> list[Doing]:
    """What each process of the run on this machine is doing."""
    roles = {pid: role for pid in processes_of(run_id) if (role := role_of(pid)) is not None}
    seen: Counter[int] = Counter()
    for _ in range(_SAMPLES):
        seen.update(pid for pid in roles if _wants_to_run(pid))
        time.sleep(0.2)
    entered = {pid: ask(run_id, pid) for pid, role in roles.items() if role == FSDP_WORKER}
    return [
        replace(_doing(pid, role, 2 * seen[pid] > _SAMPLES, node), entered=entered.get(pid))
        for pid, role in roles.items()
    ]


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
    frames = telling["frames"] if telling else []
    return Doing(
        role=role,
        pid=pid,
        node=node,
        state="stopped" if is_stopped(pid) else "busy" if busy else "waits",
        where=_place(frames[0]) if frames else None,
        own=bool(frames) and _is_own(frames[0]),
        stacks=stacks,
    )


def stacks_of(pid: int) -> tuple[list[Thread], str]:
    """The threads of a process, and all of them as text."""
    try:
        threads = threads_of(pid)
    except OSError as error:
        return [], f"  no stack: {error}\n"  # of a process without Python, say
    return threads, "".join(
        f"  {each['thread_name']}\n" + "".join(f"    {_place(frame)}\n" for frame in each["frames"]) for each in threads
    )


def _order(thread: Thread) -> tuple[bool, bool, bool, bool]:
    """First the thread in code of no library, then the one with Python's lock, then the one that executes a call of
    Ray (of an actor with asynchronous methods not the main one, which waits for messages), then the main one."""
    called = any(frame["filename"].endswith("ray/_private/function_manager.py") for frame in thread["frames"])
    own, locks = _is_own(thread["frames"][0]), thread["owns_gil"]
    return not own, not locks, not called, thread["thread_name"] != "MainThread"


def _is_own(frame: dict[str, Any]) -> bool:
    file = frame["filename"]
    return not (file.startswith("<") or "/ray/" in file or any(file.startswith(each) for each in _LIBRARIES))


def _place(frame: dict[str, Any]) -> str:
    return f"{frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"


def suspects(found: Sequence[Doing]) -> list[Doing]:
    """The processes that explain a hang: those that are stopped; else in code of no library; else a rank for which
    others wait in a collective; else busy; else a rank that is elsewhere than the other ranks. Of two ranks in two
    places nobody knows which is wrong: both are named."""
    places = [doing.where for doing in found if doing.role == FSDP_WORKER]
    absent, says = missing(dict(doing.entered for doing in found if doing.entered)) or ([], "")
    found = [replace(doing, missing=says) if doing.entered and doing.entered[0] in absent else doing for doing in found]
    usual = max(places, key=places.count, default=None) if len(set(places)) < len(places) else None
    reasons: Iterator[list[Doing]] = (
        [doing for doing in found if test(doing)]
        for test in (
            lambda doing: doing.state == "stopped",
            lambda doing: doing.own,
            lambda doing: doing.missing is not None,
            lambda doing: doing.state == "busy",
            lambda doing: doing.role == FSDP_WORKER and len(places) > 1 and doing.where != usual,
        )
    )
    return next((chosen for chosen in reasons if chosen), [])


def doing_elsewhere(run_id: str) -> list[Doing]:
    """The same on the run's other nodes; a node that does not answer is left out."""
    found: list[Doing] = []

    def look() -> None:
        with contextlib.suppress(Exception):
            found.extend(_ask_nodes(run_id))

    # Ray may be what hangs: some of its calls take no time limit.
    looks = threading.Thread(target=look, daemon=True)
    looks.start()
    looks.join(2 * _ELSEWHERE_S)
    return list(found)


def _ask_nodes(run_id: str) -> list[Doing]:
    if not ray.is_initialized():
        return []
    own = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    look = ray.remote(num_cpus=0)(doing_here)
    answers = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            run_id, node["NodeName"]
        )
        for node in others
    ]
    ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_ELSEWHERE_S) if answers else ([], [])
    return [doing for answer in ready for doing in ray.get(answer)]
