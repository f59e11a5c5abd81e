"""As in tests/unit: verl is imported once, on the CPU platform, and no function of Ray's starts a Ray."""

from __future__ import annotations

import os

os.environ["VERL_PLATFORM"] = "cpu"
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"  # small tensors, and as many tests at a time as there are cores
