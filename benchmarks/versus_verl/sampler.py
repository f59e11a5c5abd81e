"""Watches all processes of a start from outside: when each began, its CPU seconds, its memory.

Reads ``/proc`` only. Memory is PSS (resident pages, those that several processes share divided among them), so that the
sum over processes is what they occupy together; reading it takes the kernel a few milliseconds per process, so it is
read every five seconds and everything else every second. What the sampler itself uses is reported.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")
_PARENT, _USER, _SYSTEM, _STARTED = 1, 11, 12, 19  # fields of /proc/PID/stat after the command's name
PSS_INTERVAL_S = 5.0
CPU_INTERVAL_S = 1.0
IDLE = "Ray: idle worker"
FORK_SERVER = "fork server"
_OWN = {"recipe.fspo.cpu.fork_server": FORK_SERVER, "recipe.fspo.faults.reaper": "guardian"}
#: Kinds that become others, and how long after its beginning a process may still change its title.
_UNSETTLED = ("?", IDLE, "python", FORK_SERVER)
_SETTLED_AFTER_S = 40.0
#: What a command line says of a process that gave itself no title.
_KINDS = (
    ("gcs_server", "Ray: gcs_server"),
    ("raylet/raylet", "Ray: raylet"),
    ("log_monitor.py", "Ray: log monitor"),
    ("monitor.py", "Ray: autoscaler monitor"),
    ("dashboard/agent.py", "Ray: dashboard agent"),
    ("ray::DashboardAgent", "Ray: dashboard agent"),
    ("runtime_env/agent", "Ray: runtime_env agent"),
    ("ray::RuntimeEnvAgent", "Ray: runtime_env agent"),
    ("dashboard/dashboard.py", "Ray: dashboard"),
    ("ray-dashboard", "Ray: dashboard"),
    ("resource_tracker", "multiprocessing resource tracker"),
    ("ray::IDLE", IDLE),
    ("default_worker.py", IDLE),
)


def process_kind(command_line: str) -> str:
    """A short name for a process: Ray's and vLLM's titles without the method, Ray's own services, the launcher."""
    for part, kind in _KINDS:
        if part in command_line:
            return kind
    if found := re.match(r"ray::(\w+)", command_line):
        return found[1]
    if command_line.startswith("VLLM::"):
        return command_line.split()[0]
    if found := re.search(r" -m ([\w.]+)", command_line):
        return _OWN.get(found[1], "launcher")
    return Path(command_line.split()[0]).name if command_line.split() else "?"


@dataclass
class Seen:
    """One process of the start."""

    pid: int
    kind: str
    began_s: float
    cpu: list[tuple[float, float]] = field(default_factory=list)
    peak_pss_kib: int = 0

    def cpu_at(self, moment_s: float) -> float:
        """CPU seconds at ``moment_s`` after the start: the last sample before it."""
        return max((cpu for t, cpu in self.cpu if t <= moment_s), default=0.0)


def _stat(pid: int) -> list[str] | None:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None


def _all_stats() -> Iterator[tuple[int, list[str]]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            yield int(name), fields


def pss_kib(pid: int) -> int:
    """Proportional set size; 0 for a process that is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used since it was started."""
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICK  # all but idle and waiting for the disk


class Sampler:
    """All descendants of ``root``. :meth:`sample` is called often and decides itself what is due."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.started = time.monotonic()
        self.processes: dict[tuple[int, int], Seen] = {}  # by PID and the clock tick in which it began
        self.peak_pss_kib = 0
        self.peak_at: dict[str, int] = {}
        self._cpu_due = self._pss_due = 0.0
        self._alive: list[Seen] = []
        self._machine_before, self._own_before = busy_seconds(), sum(os.times()[:2])

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def sample(self) -> None:
        """Read what is due."""
        now = self.now()
        if now >= self._cpu_due:
            self._cpu_due = now + CPU_INTERVAL_S
            self._sample_cpu(now)
        if now >= self._pss_due:
            self._pss_due = now + PSS_INTERVAL_S
            self._sample_pss()

    def _sample_cpu(self, now: float) -> None:
        stats = dict(_all_stats())
        family, self._alive = {self.root}, []
        clock_s = float(Path("/proc/uptime").read_text().split()[0])
        for pid in sorted(stats, key=lambda p: int(stats[p][_STARTED])):
            fields = stats[pid]
            identity = (pid, int(fields[_STARTED]))
            # A process whose parent has ended has another parent; it was seen before.
            if pid != self.root and int(fields[_PARENT]) not in family and identity not in self.processes:
                continue
            family.add(pid)
            seen = self.processes.get(identity)
            if seen is None:
                began_s = now - (clock_s - identity[1] / _TICK)
                seen = self.processes[identity] = Seen(pid, "?", max(0.0, began_s))
            self._alive.append(seen)
            seen.cpu.append((now, (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICK))
            if seen.kind not in _UNSETTLED and now - seen.began_s > _SETTLED_AFTER_S:
                continue
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                kind = process_kind(line)
                # A worker of Ray is idle before it is something, and again after.
                if line and (seen.kind == "?" or kind not in _UNSETTLED):
                    seen.kind = kind

    def _sample_pss(self) -> None:
        found = [(seen, pss_kib(seen.pid)) for seen in self._alive]
        for seen, pss in found:
            seen.peak_pss_kib = max(seen.peak_pss_kib, pss)
        if (total := sum(pss for _, pss in found)) > self.peak_pss_kib:
            self.peak_pss_kib, self.peak_at = total, {}
            for seen, pss in found:
                self.peak_at[seen.kind] = self.peak_at.get(seen.kind, 0) + pss

    def kill_the_rest(self) -> None:
        """Kill every process of the start that is still there."""
        self._sample_cpu(self.now())
        for seen in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(seen.pid, signal.SIGKILL)

    def report(self, until_s: float) -> dict[str, Any]:
        """What was seen; CPU seconds are those until ``until_s``."""
        elapsed = self.now()
        ours = sum(seen.cpu_at(elapsed) for seen in self.processes.values())
        sampler = sum(os.times()[:2]) - self._own_before
        others = busy_seconds() - self._machine_before - ours - sampler
        return {
            "peak_pss_mib": round(self.peak_pss_kib / 1024),
            "peak_by_kind_mib": {kind: round(kib / 1024) for kind, kib in sorted(self.peak_at.items())},
            "cpu_until_first_step_s": round(sum(seen.cpu_at(until_s) for seen in self.processes.values()), 1),
            "cpu_s": round(ours, 1),
            "sampler_cpu_s": round(sampler, 1),
            "others_share": round(max(0.0, others) / elapsed / (os.cpu_count() or 1), 3),
            "processes": [
                {
                    "kind": seen.kind,
                    "began_s": round(seen.began_s, 1),
                    "cpu_s": round(seen.cpu_at(until_s), 1),
                    "peak_pss_mib": round(seen.peak_pss_kib / 1024),
                }
                for seen in sorted(self.processes.values(), key=lambda seen: seen.began_s)
            ],
        }
