"""Notices within a second that a process of the run has died, and makes sure that the run ends.

Left to themselves Ray, verl and vLLM wait: a trainer polls for responses that nobody generates any more, a call to an
engine that is gone does not return. The kernel says at once when a process ends (``pidfd_open``), in the right order.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

from recipe.fspo.phase import Phase
from recipe.fspo.processes import CLOSED_BY_TRAINER, ROLES, log_of, marked, role_of

#: How often new processes are looked for.
_LOOK_EVERY_S = 0.2
#: How long an error may take to come out of Ray by itself after a death, before the run is stopped.
GRACE_S = 8.0
#: How long the stopped run may take to end after that, before its launching process leaves without waiting.
LEAVE_S = 15.0


@dataclass(frozen=True)
class Death:
    """A process of the run (or a whole node, without a process number) that ended before the run did."""

    role: str
    pid: int | None
    log: str | None
    phase: Phase | None
    node: str | None = None

    def sentence(self) -> str:
        """Which process, when, and where its log is."""
        there = f" on {self.node}" if self.node else ""
        process = "" if self.pid is None else f" (process {self.pid}{there})"
        when = f" {self.phase.words()}" if self.phase else ""
        log = f"; its log: {self.log}{there}" if self.log else ""
        return f"the {self.role}{process} died{when}{log}"


class Watch:
    """A thread of the launching process that waits for the first death among the run's processes.

    Args:
        mark: Value of the run's mark (:mod:`recipe.fspo.processes`).
        phase: Tells what the run is doing.
        on_death: Called with the death at once.
        stop: Called if the run goes on ``GRACE_S`` after it; should make the launcher's call to Ray return.
        leave: Called if it still goes on ``LEAVE_S`` later; should end this process.
    """

    def __init__(
        self,
        mark: str,
        phase: Callable[[], Phase | None],
        on_death: Callable[[Death], None],
        stop: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        self._mark, self.phase = mark, phase
        self._on_death, self._stop_run, self._leave = on_death, stop, leave
        self._known: dict[int, tuple[str, int, str | None]] = {}  # by file descriptor: role, process, log
        self._seen: set[int] = set()
        self._foreign: set[int] = set()
        self._poll = select.poll()
        self.over = threading.Event()
        self.death: Death | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")

    def start(self) -> None:
        """Begin; where the kernel has no pidfd (not Linux), nothing is watched."""
        if hasattr(os, "pidfd_open"):
            self._thread.start()

    def stop(self) -> None:
        """The run is over: deaths from now on are meant."""
        self.over.set()

    def report(self, death: Death) -> None:
        """Take a death on another node for the first, unless there was one here."""
        self.death = self.death or death

    def _run(self) -> None:
        while self.death is None and not self.over.is_set():
            self._look()
            ended = {descriptor for descriptor, _ in self._poll.poll(1000 * _LOOK_EVERY_S)}
            if ended and not self.over.is_set():
                self.death = self._first_of(ended)
        for descriptor in self._known:
            os.close(descriptor)
        if self.death is None:
            return
        self._on_death(self.death)
        if not self.over.wait(GRACE_S):
            threading.Thread(target=self._stop_run, daemon=True).start()  # a call to a dead Ray may not return
            if not self.over.wait(LEAVE_S):
                self._leave()

    def _look(self) -> None:
        """Take in the processes that have come since the last look."""
        for pid in marked(self._mark, self._foreign):
            role = None if pid in self._seen else role_of(pid)
            if role is None:
                continue
            with contextlib.suppress(OSError):  # it has gone in the meantime
                descriptor = os.pidfd_open(pid)
                self._known[descriptor] = (role, pid, log_of(pid))
                self._seen.add(pid)
                self._poll.register(descriptor, select.POLLIN)

    def _first_of(self, ended: set[int]) -> Death | None:
        """The cause among processes that ended within the same moment: the others ended because of it."""
        phase = self.phase()
        order = list(ROLES.values())
        cause: Death | None = None
        for descriptor in ended:
            self._poll.unregister(descriptor)
            role, pid, log = self._known[descriptor]
            if phase is not None and phase.ending and role in CLOSED_BY_TRAINER:
                continue
            if cause is None or order.index(role) > order.index(cause.role):
                cause = Death(role, pid, log, phase)
        return cause
