"""``updates()``: what :mod:`worker_update` prints, run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def updates(folder: Path, *words: str) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("worker_update.py")
    environment = {**os.environ, "PYTHONPATH": f"{script.parents[2]}{os.pathsep}{script.parent}"}
    command = [sys.executable, "-W", "ignore", str(script), str(folder), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
