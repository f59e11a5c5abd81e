"""Unit tests run in one process, in which verl is imported once: on the CPU platform."""

from __future__ import annotations

import os

os.environ["VERL_PLATFORM"] = "cpu"
