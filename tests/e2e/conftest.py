"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_stack import Starter


@pytest.fixture(scope="module")
def start() -> Iterator[Starter]:
    """Starts the real stack; everything is stopped when the module's tests are over."""
    with Starter() as starter:
        yield starter
