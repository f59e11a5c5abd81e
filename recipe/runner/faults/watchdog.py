"""Notices within a second that a process of the run has died, on any node, and makes sure that the run ends.

Left to themselves Ray, verl and vLLM wait: a trainer polls for responses that nobody generates any more, a call to an
engine that is gone does not return. The kernel says at once when a process ends (``pidfd_open``), in the right order.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.runner.faults.errors import Death, kills_for_memory, remedy_of
from recipe.runner.faults.phase import Phase
from recipe.runner.faults.processes import CLOSED_BY_TRAINER, ROLES, log_of, processes_of, role_of, stopped_process

#: How often new processes are looked for.
_LOOK_EVERY_S = 0.2
#: How often new nodes, and answers from the nodes, are looked for.
_LOOK_AT_NODES_EVERY_S = 2.0
#: How long an error may take to come out of Ray by itself after a death, before the run is stopped.
GRACE_S = 8.0
#: How long the stopped run may take to end after that, before its launching process leaves without waiting.
LEAVE_S = 15.0


class Watchdog:
    """A thread of the launching process that waits for the first death among the run's processes.

    Args:
        run_id: Of the run (:mod:`recipe.runner.faults.processes`).
        phase: Tells what the run is doing.
        on_death: Called with the death at once.
        stop: Called if the run goes on ``GRACE_S`` after it; should make the launcher's call to Ray return.
        leave: Called if it still goes on ``LEAVE_S`` later; should end this process.
    """

    def __init__(
        self,
        run_id: str,
        phase: Callable[[], Phase | None],
        on_death: Callable[[Death], None],
        stop: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        self._run_id, self.phase = run_id, phase
        self._on_death, self._stop_run, self._leave = on_death, stop, leave
        self._known: dict[int, tuple[str, int, str | None]] = {}  # by descriptor: role, process, log
        self._seen: set[int] = set()
        self._foreign: set[int] = set()
        self._poll = select.poll()
        self.over = threading.Event()
        self.death: Death | None = None

    def start(self) -> None:
        """Begin; where the kernel has no pidfd (not Linux), nothing is watched."""
        if hasattr(os, "pidfd_open"):
            threading.Thread(target=self._run, daemon=True, name="watchdog").start()

    def stop(self) -> None:
        """The run is over: processes that end from now on are expected to."""
        self.over.set()

    def report(self, death: Death) -> None:
        """Take a death on another node for the first, unless there was one here."""
        self.death = self.death or death

    def _run(self) -> None:
        kills = kills_for_memory()
        while self.death is None and not self.over.is_set():
            earlier, kills = kills, kills_for_memory()  # a process may be killed while others are looked for
            self._look()
            ended = {descriptor for descriptor, _ in self._poll.poll(1000 * _LOOK_EVERY_S)}
            if ended and not self.over.is_set():
                self.death = self._first_of(ended, kills_for_memory() > earlier)
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
        """Take in the processes that were started since the last look."""
        for pid in processes_of(self._run_id, self._foreign):
            role = None if pid in self._seen else role_of(pid)
            if role is None:
                continue
            with contextlib.suppress(OSError):  # it has gone in the meantime
                descriptor = os.pidfd_open(pid)
                self._known[descriptor] = (role, pid, log_of(pid))
                self._seen.add(pid)
                self._poll.register(descriptor, select.POLLIN)

    def _first_of(self, ended: set[int], for_memory: bool) -> Death | None:
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
                memory = remedy_of(role) if for_memory else None
                # Ray's node, for one, dies if its control service is stopped and does not answer for minutes.
                cause = Death(role, pid, log, phase, memory=memory, why=stopped_process(self._run_id))
        return cause


def other_nodes() -> list[tuple[str, NodeAffinitySchedulingStrategy]]:
    """The living nodes of Ray but this one: the name, and what makes a task or an actor run there."""
    own = ray.get_runtime_context().get_node_id()
    return [
        (node["NodeName"], NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != own
    ]


@ray.remote(num_cpus=0)
class _NodeWatcher:
    """Waits on one node, as the launching process does on its own."""

    def first_death(self, run_id: str) -> Death:
        """Of a process of the run here, without its phase; returns only then."""
        heard: queue.Queue[Death] = queue.Queue()
        Watchdog(run_id, lambda: None, heard.put, lambda: None, lambda: None).start()
        return heard.get()


class OtherNodes(threading.Thread):
    """A thread of the launching process that reports the first death on each other node, once Ray is up.

    Ray's runtime environment carries ``run_id`` to the other nodes. ``over`` is set once the run is over.
    """

    def __init__(
        self, run_id: str, phase: Callable[[], Phase | None], report: Callable[[Death], None], over: threading.Event
    ) -> None:
        super().__init__(daemon=True, name="watchdog of other nodes")
        self._run_id, self._phase, self._report, self._over = run_id, phase, report, over
        self._watchers: dict[str, tuple[str, Any, Any]] = {}  # by node: its name, the actor, its answer to come

    def run(self) -> None:
        while not self._over.wait(_LOOK_AT_NODES_EVERY_S):
            if ray.is_initialized():
                with contextlib.suppress(Exception):  # Ray on this node is gone: the watchdog of this node notices
                    self._look()

    def _look(self) -> None:
        for name, there in other_nodes():
            if there.node_id not in self._watchers:
                watcher = _NodeWatcher.options(scheduling_strategy=there).remote()
                self._watchers[there.node_id] = (name, watcher, watcher.first_death.remote(self._run_id))
        for node_id, (name, _, answer) in list(self._watchers.items()):
            if not ray.wait([answer], timeout=0)[0]:
                continue
            phase = self._phase()
            try:
                death = ray.get(answer)
            except ray.exceptions.RayError:
                self._report(Death(f"Ray node {name}", None, None, phase))
            else:
                if phase is None or not phase.ending or death.role not in CLOSED_BY_TRAINER:
                    self._report(replace(death, phase=phase, node=name))
            del self._watchers[node_id]
