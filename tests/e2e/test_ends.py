"""However a run ends, it says so and leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
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


#: A verifier with a fault: one response in eight gets no number.
NAN_REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float("nan") if zlib.crc32(solution_str.encode()) % 8 == 0 else float(len(solution_str) % 2)
"""


@pytest.mark.slow
def test_an_update_that_is_not_finite_stops_the_run_and_keeps_its_batch(start: Starter, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(NAN_REWARD)
    override = f"reward.custom_reward_function.path={reward}"
    run = start(tmp_path, *SMALL, override, "trainer.total_training_steps=5")
    assert run.wait(400) != 0
    assert "the gradient norm of a mini-batch is nan: not finite in it: advantages" in run.output()
    batch = torch.load(run.run_dir / "bad_batch_rank0.pt", weights_only=False)
    assert torch.isnan(batch["advantages"].values()).any()
    assert not list(run.run_dir.glob("checkpoints/global_step_*")), "nothing was trained, so nothing is saved"
    assert run.left_behind() == []
