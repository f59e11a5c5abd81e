"""The processes of one run on this machine: found by the run id in their environment, named by what they do.

All inherit the launching process's environment; in a cluster that the run joins, Ray's runtime environment carries it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

#: Environment variable with each run's own value.
RUN_ID_VARIABLE = "FSPO_RUN_ID"
#: Names for people of the processes that a run cannot do without, by how their title (or program) begins.
# upstream: ray._private.worker "ray._raylet.setproctitle"
# upstream: vllm.v1.engine.core "set_process_title(process_title)"
ROLES = {
    "ray::TaskRunner": "trainer",
    "ray::WorkerDict": "FSDP worker",
    "ray::vLLMHttpServer": "vLLM server",
    "VLLM::EngineCore": "vLLM engine",
    "VLLM::Worker": "vLLM engine's worker",
    "ray::CheckpointEngineWorker": "receiver of the weights",
    "ray::RewardLoopWorker": "reward worker",
    "ray::AgentLoopWorker": "agent loop",
    "ray::GlobalRequestLoadBalancer": "load balancer of the vLLM servers",
    "ray::TransferQueueController": "TransferQueue's controller",
    "ray::SimpleStorageUnit": "TransferQueue's storage",
    "raylet": "Ray node (raylet)",
    "gcs_server": "control service of Ray (gcs_server)",
}
#: Roles whose processes the trainer closes by itself when it ends.
CLOSED_BY_TRAINER = ("TransferQueue's controller", "TransferQueue's storage")
#: A process may have another program after less than so many seconds.
_SETTLED_S = 60.0


@functools.cache
def own_run_id() -> str:
    """The id of the run that this process launches, from the first call on in its environment."""
    os.environ["SPT_NOENV"] = "1"  # else setproctitle, with which processes name themselves, wipes the environment
    os.environ[RUN_ID_VARIABLE] = run_id = uuid.uuid4().hex
    return run_id


def is_alive(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    return _status(pid) not in ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    return _status(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""


def processes_of(run_id: str, foreign: set[int] | None = None) -> list[int]:
    """Living processes with this run id in their environment, except the calling one.

    ``foreign``: those known not to belong to the run, which are not read again; updated in place.
    """
    foreign = set() if foreign is None else foreign
    pids = set(psutil.pids()) - {os.getpid()}
    foreign &= pids
    of_run = []
    for pid in sorted(pids - foreign):
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            try:
                environment = process.environ()
            except psutil.AccessDenied:  # another user's, or the kernel's; of these a node has thousands
                environment = {"": ""}
            if environment.get(RUN_ID_VARIABLE) == run_id:
                of_run.append(pid)
            # Ray starts a worker in the environment of its node, which may serve many runs, and gives it the run's by
            # replacing its program, under the same number.
            elif environment and time.time() - process.create_time() > _SETTLED_S:
                foreign.add(pid)
    return [pid for pid in of_run if is_alive(pid)]


def _role(process: psutil.Process) -> str | None:
    title = "".join(process.cmdline()[:1])
    program = title.rpartition("/")[2]
    return next((role for start, role in ROLES.items() if title.startswith(start) or program == start), None)


def role_of(pid: int) -> str | None:
    """What the process is for the run; None for one that may come and go."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        role, parent = _role(process), process.parent()
        # Between fork and exec a child has its parent's title: any program that a worker calls would count as a worker.
        return None if parent is not None and _role(parent) == role else role
    return None


def log_of(pid: int) -> str | None:
    """The file that the process writes its errors to, if it is one."""
    with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/{pid}/fd/2")  # psutil does not tell which descriptor a file has
        if target.startswith("/") and Path(target).is_file():
            return target
    return None


@dataclass(frozen=True)
class Process:
    """A process that a run cannot do without."""

    role: str  #: One of :data:`ROLES`, or how Ray calls it.
    pid: int
    log: str | None = None  #: The file that it writes its errors to.
    node: str | None = None  #: Where it is, if not on this machine.
    for_memory: bool = False  #: Whether the kernel has killed it for memory.

    def __str__(self) -> str:
        return f"the {self.role} (process {self.pid}{f' on {self.node}' if self.node else ''})"


class Processes:
    """Those processes of a run on this machine, but the calling one, that it cannot do without.

    The kernel says at once when one of them ends (``pidfd_open``).
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._by_descriptor: dict[int, Process] = {}
        self._foreign: set[int] = set()
        self._kills = kills_for_memory()

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._by_descriptor.values()))

    def first_end(self, expected: Callable[[], Sequence[str]] = tuple) -> Process | None:
        """Wait 0.2 s at most; of several that end, return the one that took the others along: the last in ROLES.

        None if none ends but those with a role in ``expected()``.
        """
        earlier, self._kills = self._kills, kills_for_memory()  # one may be killed while others are looked for
        known = {process.pid for process in self}
        for pid in processes_of(self._run_id, self._foreign):
            if pid not in known and (role := role_of(pid)) is not None:
                with contextlib.suppress(OSError):  # it has gone in the meantime
                    self._by_descriptor[os.pidfd_open(pid)] = Process(role, pid, log_of(pid))
        poll = select.poll()
        for descriptor in self._by_descriptor:
            poll.register(descriptor, select.POLLIN)
        ended = []
        for descriptor, _ in poll.poll(200):
            os.close(descriptor)
            ended.append(self._by_descriptor.pop(descriptor))
        causes = [process for process in ended if process.role not in expected()]
        order = list(ROLES.values())
        cause = max(causes, key=lambda process: order.index(process.role), default=None)
        return cause and replace(cause, for_memory=kills_for_memory() > earlier)


def kills_for_memory() -> int:
    """Processes of this machine that the kernel has killed for memory, also by a cgroup's limit, if it says so."""
    with contextlib.suppress(OSError):
        if count := re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(count[1])
    return 0


def kill(pids: list[int]) -> None:
    """SIGKILL each of them that is still there."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()
