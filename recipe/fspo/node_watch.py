"""The other nodes of a run with several: a watcher on each of them, and the loss of a whole node."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.fspo.phase import Phase
from recipe.fspo.processes import CLOSED_BY_TRAINER
from recipe.fspo.watch import Death, Watch

_LOOK_EVERY_S = 2.0


@ray.remote(num_cpus=0)
class _NodeWatcher:
    """Waits on one node, as the launching process does on its own."""

    def first_death(self, mark: str) -> tuple[str, int, str | None]:
        """Role, process and log of the first process of the run that dies here; returns only then."""
        heard: queue.Queue[Death] = queue.Queue()
        Watch(mark, lambda: None, heard.put, lambda: None, lambda: None).start()
        death = heard.get()
        return death.role, death.pid, death.log


class OtherNodes:
    """A thread of the launching process that reports the first death on another node.

    Args:
        mark: Value of the run's mark, which Ray's runtime environment carries to the other nodes.
        phase: Tells what the run is doing.
        report: Called with each death.
        over: Set once the run is over.
    """

    def __init__(
        self, mark: str, phase: Callable[[], Phase | None], report: Callable[[Death], None], over: threading.Event
    ) -> None:
        self._mark, self._phase, self._report, self._over = mark, phase, report, over
        self._watchers: dict[str, tuple[str, Any, Any]] = {}  # by node: its name, the actor, its answer to come
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch of other nodes")

    def start(self) -> None:
        """Begin; nodes are looked for as soon as Ray is up."""
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            if ray.is_initialized():
                with contextlib.suppress(Exception):  # Ray on this node is gone: the watch of this node sees that
                    self._look()

    def _look(self) -> None:
        own = ray.get_runtime_context().get_node_id()
        for node in ray.nodes():
            name, node_id = node["NodeName"], node["NodeID"]
            if node["Alive"] and node_id != own and node_id not in self._watchers:
                there = NodeAffinitySchedulingStrategy(node_id, soft=False)
                watcher = _NodeWatcher.options(scheduling_strategy=there).remote()
                self._watchers[node_id] = (name, watcher, watcher.first_death.remote(self._mark))
        for node_id, (name, _, answer) in list(self._watchers.items()):
            if not ray.wait([answer], timeout=0)[0]:
                continue
            phase = self._phase()
            try:
                role, pid, log = ray.get(answer)
            except ray.exceptions.RayError:
                self._report(Death(f"Ray node {name}", None, None, phase))
            else:
                if phase is None or not phase.ending or role not in CLOSED_BY_TRAINER:
                    self._report(Death(role, pid, log, phase, node=name))
            del self._watchers[node_id]
