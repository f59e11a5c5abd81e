"""The least a start-up could take: the processor seconds of the imports that remain, over the cores.

Each process of the recipe's start that still imports for itself is imitated by a fresh Python that does nothing else;
its processor seconds are the kernel's account of it, so that other work on the machine hardly counts.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from statistics import median

from benchmarks.pages import markdown
from recipe.fspo.cpu.fork_server import MODULES, MODULES_WITH_RAY
from recipe.fspo.launch.machine import CPU_ENVIRONMENT

#: Process and the modules that it imports.
PROCESSES = {
    "launcher": ("recipe.fspo.main", "recipe.fspo.launch.start"),
    "fork server": ("recipe.fspo.cpu.patches", *MODULES, *MODULES_WITH_RAY),
}


def cpu_seconds(modules: tuple[str, ...]) -> float:
    """User and system seconds of a fresh Python that imports ``modules``."""
    code = f"import importlib; import verl; [importlib.import_module(m) for m in {modules!r}]"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, **CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(repeats: int = 3) -> dict[str, list[float]]:
    """CPU seconds of each process, in alternated turns."""
    found: dict[str, list[float]] = {name: [] for name in PROCESSES}
    for _ in range(repeats):
        for name, modules in PROCESSES.items():
            found[name].append(round(cpu_seconds(modules), 2))
    return found


def table(found: dict[str, list[float]]) -> str:
    """The floor, process by process."""
    cores = len(os.sched_getaffinity(0))
    rows = [[name, f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"] for name, values in found.items()]
    total = sum(median(values) for values in found.values())
    rows.append([f"**all, over {cores} cores**", f"**{total:.1f} / {cores} = {total / cores:.1f} s**"])
    return markdown(["imports of", "CPU seconds"], rows)
