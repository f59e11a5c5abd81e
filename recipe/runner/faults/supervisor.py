"""One thread that waits for the first failure of a run, a death or a hang on any node, and ends the run then.

Left to themselves Ray, verl and vLLM wait: a trainer polls for responses that nobody generates any more, a call to an
engine that is gone does not return.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.runner.faults.errors import Failure, death, explained
from recipe.runner.faults.hang import HangLimit, stopped_of
from recipe.runner.faults.phase import Phase, during, read_phase, say
from recipe.runner.faults.processes import CLOSED_BY_TRAINER, Process, Processes, is_stopped, kill
from recipe.runner.faults.reaper import Reaper

#: How often new nodes, and answers from the nodes, are looked for.
_LOOK_AT_NODES_EVERY_S = 2.0
#: An error of Ray may come so much sooner than the death behind it is seen, on another node for one.
_SEEN_S = 1.5 * _LOOK_AT_NODES_EVERY_S
#: How long the nodes may take to look at their processes.
_STACKS_S = 30.0
#: How long an error may take to come out of Ray by itself after a failure, before the run is stopped, and how long the
#: stopped run may take to end, before its launching process leaves without waiting.
GRACE_S, LEAVE_S = 8.0, 15.0


def _may_end(phase: Phase | None) -> tuple[str, ...]:
    """Roles of processes that may end now."""
    return CLOSED_BY_TRAINER if phase is not None and phase.ending else ()


class Supervisor(threading.Thread):
    """A thread of the launching process, and what else that process does to end the run with this id and folder.

    If the run goes on ``GRACE_S`` after a failure, ``stop`` is called, which should make the launcher's call to Ray
    return; if it still does after ``LEAVE_S``, this process says the failure's sentence and ends with the exit status
    that ``record`` returns, which notes it. ``other_nodes``: whether the run may have processes there.
    """

    def __init__(
        self,
        run_id: str,
        run_dir: str | Path,
        stop: Callable[[], None],
        record: Callable[[str], int],
        hang: HangLimit | None = None,
        other_nodes: bool = False,
    ) -> None:
        super().__init__(daemon=True, name="supervisor")
        self.failure: Failure | None = None  #: The first one.
        self.over = threading.Event()  #: Set once processes of the run are expected to end.
        self.processes = Processes(run_id)
        self._run_dir, self._stop_run, self._record, self._hang = Path(run_dir), stop, record, hang
        self._nodes = OtherNodes(run_id, self._phase, self._report, self.over) if other_nodes else None
        self._reaper = Reaper(run_id, str(run_dir))

    def _report(self, failure: Failure) -> None:
        self.failure = self.failure or failure

    def run(self) -> None:
        if self._nodes is not None:
            self._nodes.start()
        while self.failure is None and not self.over.is_set():
            ended = self.processes.first_end(lambda: _may_end(self._phase()))
            if ended is not None and not self.over.is_set():
                self._report(death(ended, self._phase()))
            if self._hang is not None and (hang := self._hang.look(self._stopped)) is not None:
                self._report(hang)
        if self.failure is None or self.over.wait(GRACE_S):
            return
        threading.Thread(target=self._stop_run, daemon=True).start()  # a call to a dead Ray may not return
        if not self.over.wait(LEAVE_S):
            say(f"error: {self.failure.sentence}", sys.stderr)
            self._reaper.bye()  # it ends what is left
            os._exit(self._record(self.failure.sentence))

    def _phase(self) -> Phase | None:
        return read_phase(self._run_dir)

    def _stopped(self) -> list[Process]:
        return [*stopped_of(self.processes), *(self._nodes.stopped() if self._nodes is not None else [])]

    def explain(self, error: BaseException, log: Path) -> Failure:
        """What a person needs of an error of Ray, behind which a stopped process may be."""
        phase = self._phase()
        for _ in range(int(_SEEN_S / 0.1)):
            if self.failure is None:
                time.sleep(0.1)
        if stopped := next((process for process in self.processes if is_stopped(process.pid)), None):
            self._report(Failure(f"{stopped} is stopped, so that the run failed{during(phase)}"))
        return explained(error, log, self.failure, phase)

    def let_go(self, folder: Path | None) -> None:
        """Leave the run, and the folder of its Ray, to the reaper: this process ends now."""
        self.over.set()
        self._reaper.bye(folder)

    def close(self) -> None:
        """End what there is of the run; it may have ended by itself."""
        if self.failure is None:  # else the thread ends this process within LEAVE_S
            self.over.set()
        # A stopped Ray node never answers ray.shutdown(), which keeps Python's lock meanwhile.
        kill([process.pid for process in self.processes if is_stopped(process.pid)])
        ray.shutdown()  # may not return where a part of Ray has died
        self.over.set()
        self._reaper.bye()


@ray.remote(num_cpus=0, max_concurrency=2)
class _NodeWatcher:
    def __init__(self, run_id: str) -> None:
        self._processes = Processes(run_id)

    def first_end(self) -> Process:
        while (ended := self._processes.first_end()) is None:
            pass
        return ended

    def stopped(self) -> list[Process]:
        return stopped_of(self._processes)


class OtherNodes(threading.Thread):
    """A thread of the launching process that reports the first death on each other node, until the run is ``over``."""

    def __init__(self, run_id: str, phase: Callable[[], Phase | None], report: Any, over: threading.Event) -> None:
        super().__init__(daemon=True, name="supervisor of other nodes")
        self._run_id, self._phase, self._report, self._over = run_id, phase, report, over
        self._watchers: dict[str, tuple[str, Any, Any]] = {}  # by node: its name, the actor, its answer to come

    def run(self) -> None:
        while not self._over.wait(_LOOK_AT_NODES_EVERY_S):
            if ray.is_initialized():
                with contextlib.suppress(Exception):  # Ray on this node is gone: the supervisor notices
                    self._look()

    def _look(self) -> None:
        own = ray.get_runtime_context().get_node_id()
        for node in ray.nodes():
            if node["Alive"] and node["NodeID"] not in (own, *self._watchers):
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                watcher = _NodeWatcher.options(scheduling_strategy=there).remote(self._run_id)
                self._watchers[node["NodeID"]] = (node["NodeName"], watcher, watcher.first_end.remote())
        for node_id, (name, _, answer) in list(self._watchers.items()):
            if not ray.wait([answer], timeout=0)[0]:
                continue
            phase = self._phase()
            try:
                ended = ray.get(answer)
            except ray.exceptions.RayError:
                self._report(Failure(f"the Ray node {name} died{during(phase)}"))
            else:
                if ended.role not in _may_end(phase):
                    self._report(death(replace(ended, node=name), phase))
            del self._watchers[node_id]

    def stopped(self) -> list[Process]:
        """Processes of the run on the other nodes that are stopped; a node that does not answer is left out."""
        stopped: list[Process] = []

        def ask() -> None:
            with contextlib.suppress(Exception):
                asked = {watcher.stopped.remote(): name for name, watcher, _ in list(self._watchers.values())}
                for answer in ray.wait([*asked], num_returns=len(asked), timeout=_STACKS_S)[0]:
                    stopped.extend(replace(process, node=asked[answer]) for process in ray.get(answer))

        # Ray may be what hangs: some of its calls take no time limit.
        asks = threading.Thread(target=ask, daemon=True)
        asks.start()
        asks.join(1.5 * _STACKS_S)
        return list(stopped)
