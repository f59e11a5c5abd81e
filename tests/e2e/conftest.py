"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import pytest
from real_stack import starter

#: Starts the real stack; everything is stopped when the module's tests are over.
start = pytest.fixture(starter, scope="module", name="start")
