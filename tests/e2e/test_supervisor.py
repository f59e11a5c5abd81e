"""A death on another node, and the loss of a node, are told to the launching process: on two real Ray nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_stack import Starter, probed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_death_elsewhere_is_told(start: Starter, tmp_path: Path) -> None:
    run = start.module(tmp_path, "supervisor_probe", **probed(tmp_path))
    run.wait(200)
    for says in (
        r"(\d+): the FSDP worker \(process \1 on \S+\) died during the generation of step 3; its log: \S+ on \S+",
        r"the node: the Ray node \S+ died during the generation of step 3",
        r"(\d+): .*\nstopped: the FSDP worker \(process \1 on \S+\)",
    ):
        assert re.search(rf"^killed {says}$", run.output(), re.M), run.output()[-3000:]
