"""What all tests share: the examples of Hypothesis, threads, and a small disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples every time; --hypothesis-profile=others draws others. No assertion about time.
settings.register_profile("others", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", settings.get_profile("others"), derandomize=True)
settings.load_profile("fixed")

if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core, before numpy or torch is imported
    os.environ["OMP_NUM_THREADS"] = "1"

# What nohup, or a shell that runs the tests in the background, has them ignore, what they start would ignore, too: a
# handler stays here.
for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # which Python itself ignores
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], None]]:
    """Mounts a file system of so many KiB on a folder, which it makes."""
    mounted: list[Path] = []

    def mount(folder: Path, kib: int) -> None:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root can mount a small file system to fill")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
