"""Whether a process of this machine has just ended for want of memory, shared memory too, and how much there is.

The kernel kills with SIGKILL and tells nobody but its log. Its count of such kills (``/proc/vmstat``, since Linux 4.13)
holds those by a cgroup's limit, too: if it has grown between two looks at the processes, that is why one died.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

#: What takes host memory in each process, for its message. Elsewhere: the size of a batch.
_LOWER = {
    "FSDP worker": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu)",
    "vLLM engine": "actor_rollout_ref.rollout.max_num_seqs (on CPUs also the environment variable "
    "VLLM_CPU_KVCACHE_SPACE)",
    "reward worker": "reward.num_workers",
}
_GIB = 2**30
#: What an unlimited cgroup of version 1 says is about 2**63.
_UNLIMITED = 2**60


def kills() -> int:
    """Processes of this machine that the kernel has killed for memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def limit_of(cgroups: str, root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The smallest memory limit, in bytes, of a process's cgroup and those above it; None without any.

    Args:
        cgroups: Text of ``/proc/PID/cgroup``.
        root: Where cgroups are mounted, version 1 or 2.
    """
    limits = []
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                limits.append(int((each / name).read_text(encoding="ascii")))
            if each == top:
                break
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def cgroups_of(pid: int) -> str:
    """Text of ``/proc/PID/cgroup``; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii")
    return ""


def bus_error(log: str | None, shared: Path = Path("/dev/shm")) -> str | None:
    """What to say of a process whose log ends in SIGBUS: a page of shared memory could not be had. None for others.

    It is the kernel's answer to a write where ``/dev/shm`` is full; containers often have 64 MiB of it.
    """
    try:
        told = Path(log or "").read_bytes()[-(2**16) :]
        size = psutil.disk_usage(str(shared)).total / 2**20
    except OSError:
        return None
    if b"SIGBUS received" not in told and b"Fatal Python error: Bus error" not in told:
        return None
    return (
        f"there was no shared memory left ({shared} has {size:.0f} MiB): give it more (containers: --shm-size), or "
        "lower actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    )


def remedy(role: str) -> str:
    """What to change, by the role of the process (:data:`recipe.runner.faults.processes.ROLES`)."""
    return f"ask for more, or lower {_LOWER.get(role, 'data.train_batch_size')}"


def explanation(role: str, cgroups: str) -> str:
    """How much memory there was, and what to change.

    Args:
        role: Of the process.
        cgroups: Of the process, as :func:`cgroups_of` gave them while it lived.
    """
    limit = limit_of(cgroups)
    total = psutil.virtual_memory().total
    there = f"this machine has {total / _GIB:.1f} GiB"
    if limit is not None and limit < total:
        there = f"its job or container may use {limit / _GIB:.1f} GiB"
    return f"{there}; {remedy(role)}"
