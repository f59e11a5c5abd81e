"""What the GPU job asks of verl's engine: packing and Ulysses on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow  # seventeen CPU seconds
def test_packing_ulysses_and_untied_weights_on_two_ranks(tmp_path: Path) -> None:
    """verl's engine loads what the checkpoint holds, and gives the log-probs and gradients of each sequence alone."""
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same weights, log-probs and gradients") == 2
