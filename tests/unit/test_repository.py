"""What stands beside the code: the page of settings, the examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.settings import PAGE, page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_settings_is_the_programs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m benchmarks.settings writes it"


def test_the_own_loop_trains_and_is_audited(tmp_path: Path) -> None:
    """That of TRL: tests/unit/test_trl.py; without verl: tests/unit/test_wheel.py."""
    command = [sys.executable, str(ROOT / "examples/own_loop.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "LRE" in ended.stdout and list((tmp_path / "audit").glob("responses-*.parquet"))
