"""However a run ends, it says so and leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from real_stack import SMALL, Starter, user_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algo=fspoo"], "fspo_quantile"),  # Hydra lists the choices
        (["actor_rollout_ref.model.path=/no/such/model"], "is not a folder"),
        (["data.train_batch_size=30"], "is not a multiple of"),
    ],
)
def test_bad_input_ends_before_ray_starts(tmp_path: Path, overrides: list[str], says: str) -> None:
    command = [sys.executable, "-m", "recipe.fspo.main", f"fspo.run_dir={tmp_path}/run", *overrides]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=user_environment())
    assert run.returncode == 2, run.stderr[-2000:]
    assert says in run.stderr
    assert "Traceback" not in run.stderr
    assert "ray" not in run.stdout.lower()
    assert not (tmp_path / "run" / "run.json").exists()


def test_ctrl_c_leaves_nothing_behind(start: Starter, tmp_path: Path) -> None:
    run = start(tmp_path, *SMALL, "trainer.total_training_steps=50")
    run.wait_for("step 1/50", 400)
    assert len(run.processes()) > 5
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) != 0
    assert run.left_behind() == []


def test_killed_worker_ends_the_run(start: Starter, tmp_path: Path) -> None:
    run = start(tmp_path, *SMALL, "trainer.total_training_steps=50")
    run.wait_for("step 1/50", 400)
    worker = next(p for p in run.processes() if "WorkerDict" in " ".join(p.cmdline()))
    worker.send_signal(psutil.signal.SIGKILL)
    assert run.wait(60) != 0
    assert "WorkerDict" in run.output()
    assert run.left_behind() == []
