"""Waiting for another process or thread, with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    true: Callable[[], object], seconds: float = 120.0, every: float = 0.02, said: Callable[[], str] = str
) -> None:
    """Return once it is true, asked every so often; an AssertionError that ends in ``said`` after so many seconds."""
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, f"still not after {seconds:.0f} s: {said()}"
        time.sleep(every)
