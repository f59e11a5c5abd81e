"""A death on another node, and the loss of a node, are told to the launching process: on two real Ray nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_stack import run_marked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_death_elsewhere_is_told() -> None:
    run = run_marked(str(Path(__file__).with_name("supervisor_probe.py")), timeout=200)
    for says in (
        r"(\d+): the FSDP worker \(process \1 on \S+\) died during the generation of step 3; its log: \S+ on \S+",
        r"the node: the Ray node \S+ died during the generation of step 3",
    ):
        assert re.search(rf"^killed {says}$", run.stdout, re.M), run.stdout + run.stderr[-3000:]
