"""What the plain worker and the runner's do with one batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.slow
def test_plain_verl_computes_the_loss_the_gradient_and_the_rows_of_a_run(tmp_path: Path) -> None:
    """The runner's worker takes the log-probabilities of a pack in fewer calls: equal but for rounding."""
    script = Path(__file__).with_name("same_update.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, of_run = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    for name in ("losses", "norms"):
        assert np.all(np.array(plain[name]) != 0)
        np.testing.assert_allclose(plain[name], of_run[name], rtol=1e-4, atol=1e-5, err_msg=name)
    change, other = np.array(plain["change"]), np.array(of_run["change"])  # Adam's, whose first step is nearly a sign
    assert np.linalg.norm(change) > 0 and np.linalg.norm(change - other) < 1e-2 * np.linalg.norm(change)
    assert [len(part["row"]) for part in plain["rows"]] == [8, 8] == [len(part["row"]) for part in of_run["rows"]]
    for of_plain, other in zip(plain["rows"], of_run["rows"], strict=True):
        assert of_plain.keys() == other.keys() >= {"S", "L", "A", "inside", "kept", "weight", "minibatch"}
        for name in of_plain:
            np.testing.assert_allclose(of_plain[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name)
    inside = np.concatenate([part["inside"] for part in plain["rows"]])
    assert 0 < inside.mean() < 1, "a band that leaves some out, and not all"
