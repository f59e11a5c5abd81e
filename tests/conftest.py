"""What all tests share: the examples of Hypothesis, and threads."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")  # the same examples every time; --hypothesis-profile=default draws others

if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core, before numpy or torch is imported
    os.environ["OMP_NUM_THREADS"] = "1"
