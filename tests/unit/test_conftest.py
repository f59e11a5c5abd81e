"""The option of tests/conftest.py, in a pytest of its own that loads it as a plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("seconds", "summary"), [("0", "2 skipped"), ("1000", "1 failed, 1 passed"), (None, "1 failed, 1 passed")]
)
def test_a_test_that_would_begin_too_late_is_named_as_not_run(
    tmp_path: Path, seconds: str | None, summary: str
) -> None:
    (tmp_path / "test_two.py").write_text("def test_good(): pass\ndef test_bad(): raise AssertionError\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-ra", str(tmp_path)]
    command += [f"--start-within={seconds}"] if seconds else []
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    assert f" {summary} in " in done.stdout, done.stdout + done.stderr
    for name in ("test_good", "test_bad"):
        assert (f"not run, 0 s have passed: test_two.py::{name}" in done.stdout) is (seconds == "0")
