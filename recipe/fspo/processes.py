"""The processes of one run on this machine: found by a mark in their environment, named by what they do.

Ray starts its workers itself, and vLLM its engine's processes; all of them inherit the environment of the launching
process (in a cluster that the run joins, Ray's runtime environment carries the mark).
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from pathlib import Path

#: Environment variable with a value of its own for each run.
MARK_VARIABLE = "FSPO_RUN_MARK"
#: What a person calls the processes that a run cannot do without, by how their title (or program) begins.
ROLES = {
    "ray::FSPOTaskRunner": "trainer",
    "ray::WorkerDict": "FSDP worker",
    "ray::vLLMHttpServer": "vLLM server",
    "VLLM::EngineCore": "vLLM engine",
    "VLLM::Worker": "vLLM engine's worker",
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


_own_mark: str | None = None


def own_mark() -> str:
    """The mark of the run that this process launches, from the first call on in its environment."""
    global _own_mark
    if _own_mark is None:
        _own_mark = os.environ[MARK_VARIABLE] = uuid.uuid4().hex
        os.environ["SPT_NOENV"] = "1"  # setproctitle, with which they name themselves, else wipes what carries the mark
    return _own_mark


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def is_alive(pid: int) -> bool:
    """Whether anything runs in the process (not in a zombie)."""
    state = _read(pid, "stat").rpartition(b")")[2].split()
    return bool(state) and state[0] not in (b"Z", b"X")


def marked(mark: str, foreign: set[int] | None = None) -> list[int]:
    """Living processes of the run with this mark, except the calling one.

    Args:
        mark: Its value.
        foreign: Processes that a caller who asks often knows not to be the run's; brought up to date in place.
    """
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    pids = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()} - {os.getpid()}
    environments = {pid: _read(pid, "environ") for pid in pids - (foreign or set())}
    found = {pid for pid, environment in environments.items() if wanted in environment.split(b"\0")}
    if foreign is not None:
        foreign &= pids
        # An empty one may belong to a process that is just being started.
        foreign |= {pid for pid, environment in environments.items() if environment} - found
    return [pid for pid in sorted(found) if is_alive(pid)]


def _by_title(pid: int) -> str | None:
    title = _read(pid, "cmdline").split(b"\0")[0].decode(errors="replace")
    program = title.rpartition("/")[2]
    return next((role for start, role in ROLES.items() if title.startswith(start) or program == start), None)


def role_of(pid: int) -> str | None:
    """What the process is for the run; None for one that may come and go (an idle worker of Ray, a judge)."""
    role = _by_title(pid)
    if role is None:
        return None
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    parent = int(fields[1]) if len(fields) > 1 else 0
    # Between fork and exec a child has its parent's title: any program that a worker calls would count as a worker.
    return None if _by_title(parent) == role else role


def log_of(pid: int) -> str | None:
    """The file that the process writes its errors to; None if that is no file."""
    with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/{pid}/fd/2")
        if target.startswith("/") and Path(target).is_file():
            return target
    return None


def kill(pids: list[int]) -> None:
    """SIGKILL each of them; those that are gone already are no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
