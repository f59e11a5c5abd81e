"""What stands beside the code: the page of settings, the release, the examples."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from benchmarks.settings import PAGE, page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_settings_is_the_programs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m benchmarks.settings writes it"


def test_the_version_has_one_place() -> None:
    """pyproject.toml. The newest release in the list of changes is that one."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", changes, re.M)[0]
    assert changes.index("## [Unreleased]") < changes.index(f"[{released}]") and released == version


def test_the_own_loop_trains_and_is_audited(tmp_path: Path) -> None:
    """That of TRL: tests/unit/test_trl.py; without verl: tests/unit/test_wheel.py."""
    command = [sys.executable, str(ROOT / "examples/own_loop.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "LRE" in ended.stdout and list((tmp_path / "audit").glob("responses-*.parquet"))
