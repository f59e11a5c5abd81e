"""fspo/trl.py with TRL's release, in a folder of its own: verl does not start where TRL 1.x can be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def printed(*words: object, path: str, folder: Path) -> str:
    """By a Python process that imports from there, too."""
    command, environment = [sys.executable, *map(str, words)], os.environ | {"PYTHONPATH": path}
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fspo_trains_in_trl(tmp_path: Path) -> None:
    site, root = str(tmp_path / "site"), Path(__file__).resolve().parents[2]
    printed("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, "trl==1.16.0", path="", folder=tmp_path)
    trainer = root / "tests/unit/trl_trainer.py"
    said = printed("-m", "pytest", "-q", "-p", "no:cacheprovider", trainer, path=site, folder=root)
    assert " passed" in said and "skipped" not in said
    shown = printed(root / "examples/trl_fspo.py", path=os.pathsep.join([site, str(root)]), folder=tmp_path)
    assert re.search(r"^GRPOConfig\(epsilon=0\.\d+, epsilon_high=\d", shown, re.M)
    assert "LRE" in shown and list((tmp_path / "audit").glob("responses-*.parquet"))
