"""fspo/trl.py with TRL's release, in a folder of its own: verl does not start where TRL 1.x can be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TRL = "trl==1.16.0"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fspo_trains_in_trl(tmp_path: Path) -> None:
    site, tests = tmp_path / "site", Path(__file__).with_name("trl_trainer.py")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), TRL]
    subprocess.run(pip, check=True, timeout=300)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    ended = subprocess.run(
        run,
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=tests.parents[2],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout and "skipped" not in ended.stdout
    example = [sys.executable, str(tests.parents[2] / "examples/trl_fspo.py")]
    path = os.pathsep.join([str(site), str(tests.parents[2])])
    shown = subprocess.run(
        example, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert shown.returncode == 0, shown.stderr[-4000:]
    assert re.search(r"^GRPOConfig\(epsilon=0\.\d+, epsilon_high=\d", shown.stdout, re.M)
    assert "LRE" in shown.stdout and list((tmp_path / "audit").glob("responses-*.parquet"))
