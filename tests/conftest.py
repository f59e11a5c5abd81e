"""What all tests share: the examples of Hypothesis, threads, and a cgroup."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time; --hypothesis-profile=others draws others. No assertion about time.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("others", deadline=None)
settings.load_profile("fixed")

if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core, before numpy or torch is imported
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def memory_limit() -> Iterator[Callable[[int], Path]]:
    """Sets the limit, in bytes, of a cgroup of the test's own, and returns its folder."""
    folder, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not folder.exists():
        folder, name = Path("/sys/fs/cgroup"), "memory.max"
    folder /= f"fspo-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / name).write_text("-1" if "limit" in name else "max")
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")

    def limit(size: int) -> Path:
        (folder / name).write_text(str(size))
        return folder

    yield limit
    folder.rmdir()
