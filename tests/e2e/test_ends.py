"""However a run ends, it says so and leaves no process behind.

Ctrl-C and the death of a worker are in test_train.py, where two of its starts end so.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import OmegaConf
from real_stack import SMALL, Starter, user_environment

from recipe.runner.checkpoints.integrity import resume_problems, resumed_from

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

#: Size of a checkpoint of the demo's model, with its optimizer.
CHECKPOINT_KIB = 7600


def test_bad_input_ends_before_ray_starts(tmp_path: Path) -> None:
    mistakes = ("actor_rollout_ref.model.path=/no/such/model", "data.train_batch_size=30")
    command = [sys.executable, "-m", "recipe.fspo.main", f"run.dir={tmp_path}/run", *mistakes]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=user_environment())
    assert run.returncode == 2, run.stderr[-2000:]
    assert "/no/such/model" in run.stderr and "data.train_batch_size=30" in run.stderr
    assert "Traceback" not in run.stderr
    assert "ray" not in run.stdout.lower()
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.slow
def test_a_signal_to_all_processes_saves_and_a_second_one_ends_the_run_at_once(start: Starter, tmp_path: Path) -> None:
    """SLURM sends its signals to all processes of a step; Ctrl-C: test_train.py."""
    words = (*SMALL, "trainer.total_training_steps=50", "trainer.save_freq=50")
    run = start(tmp_path, *words)
    run.wait_for("step 2/50", 400)
    for process in run.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    assert run.wait(120) == 75, run.output()[-3000:]
    saved = int((tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert saved >= 2 and f"preempted after step {saved}; it is saved" in run.output()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "preempted"
    assert run.left_behind() == []
    run = start(tmp_path, *words)
    run.wait_for(f"step {saved + 1}/50", 400)
    for number in (signal.SIGUSR2, signal.SIGTERM):
        run.process.send_signal(number)
        time.sleep(1.5)  # what comes within a second is one signal
    assert run.wait(60) == 143
    assert re.search(
        rf"^ended by SIGTERM after step \d+; the last checkpoint is that of step {saved}$", run.output(), re.M
    )
    assert f"continue: python -m recipe.fspo.main resume={tmp_path}" in run.output() and "Traceback" not in run.output()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "interrupted"
    assert run.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize("line", [pytest.param("starting Ray", marks=pytest.mark.nightly), "starting the FSDP workers"])
def test_a_stop_before_the_first_step_ends_the_run_at_once(start: Starter, tmp_path: Path, line: str) -> None:
    run = start(tmp_path, *SMALL)
    run.wait_for(line, 200)
    (tmp_path / "stop").touch()
    assert run.wait(60) == 75
    assert "before the end of the first step: nothing saved" in run.output()
    assert "sending the weights" not in run.output()
    assert not (tmp_path / "checkpoints").exists()
    assert run.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fits",
    [
        pytest.param(1, id="the second checkpoint"),
        pytest.param(0, id="the first checkpoint", marks=pytest.mark.nightly),
    ],
)
def test_a_full_disk_is_said_and_the_last_good_checkpoint_kept(
    start: Starter, tmp_path: Path, small_disk: Callable[[Path, int], None], fits: int
) -> None:
    root = tmp_path / "checkpoints"
    small_disk(root, 5 * CHECKPOINT_KIB // 2)  # room for the two that are kept, else the run would not start
    run = start(tmp_path, *SMALL, "trainer.save_freq=1", "trainer.total_training_steps=5")
    run.wait_for("starting the FSDP workers", 200)
    (root / "other").write_bytes(bytes((2 - fits) * CHECKPOINT_KIB * 1024))
    assert run.wait(400) == 1
    error = next(line for line in run.output().splitlines() if line.startswith("error: "))
    assert f"the checkpoint of step {1 + fits}" in error and f" MiB are free in {root}; " in error
    assert (f"{root}/global_step_1" in error) is bool(fits)
    assert [path.name for path in root.glob("global_step_*")] == ["global_step_1"] * fits
    trainer = OmegaConf.load(tmp_path / "config.yaml").trainer
    assert list(resume_problems(trainer, None, resumed_from(trainer))) == []
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"
    assert run.left_behind() == []


@pytest.mark.slow
def test_a_run_folder_that_fills_is_said(
    start: Starter, tmp_path: Path, small_disk: Callable[[Path, int], None]
) -> None:
    folder = tmp_path / "run"
    small_disk(folder, 8 * CHECKPOINT_KIB)
    run = start(tmp_path / "log", *SMALL, "trainer.total_training_steps=50", f"run.dir={folder}")
    run.wait_for("step 2/50", 400)
    with contextlib.suppress(OSError), (folder / "other").open("wb", buffering=0) as other:
        while other.write(bytes(4096)):
            pass
    assert run.wait(100) == 1
    assert re.search(
        rf"^error: {folder}/\S+ cannot be written \(No space left on device\): make room", run.output(), re.M
    )
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
    # This recipe's reward manager would end the run before the update.
    overrides = [f"reward.custom_reward_function.path={reward}"]
    overrides += ["reward.reward_manager.source=register", "reward.reward_manager.name=naive"]
    run = start(tmp_path, *SMALL, *overrides, "trainer.total_training_steps=5")
    assert run.wait(400) != 0
    assert "error: the loss refuses a mini-batch: row " in run.output()
    assert "advantages_BT is not finite. The mini-batch is saved as" in run.output()
    batch = torch.load(run.run_dir / "bad_batch_rank0.pt", weights_only=False)
    assert torch.isnan(batch["advantages"].values()).any()
    assert not list(run.run_dir.glob("checkpoints/global_step_*")), "nothing was trained, so nothing is saved"
    assert run.left_behind() == []


#: A policy loss in which one rank enters a collective that the other skips, once the file is there.
SKIPPING_LOSS = """
import os
from dataclasses import dataclass
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import PolicyLossConfig

@dataclass
class SkippingLossConfig(PolicyLossConfig):
    loss_mode: str = "skipping"
    trigger: str = ""

@register_policy_loss("skipping")
def loss(*tensors, config, **named):
    if os.path.exists(config.policy_loss.trigger) and torch.distributed.get_rank() == 1:
        torch.distributed.barrier()
    return get_policy_loss_fn("vanilla")(*tensors, config=config, **named)
"""
SKIPPING_ALGO = """# @package _global_
fspo: {algo: skipping}
algorithm: {adv_estimator: grpo}
actor_rollout_ref: {actor: {policy_loss: {_target_: skipping.SkippingLossConfig, loss_mode: skipping, trigger: ""}}}
"""


@pytest.mark.slow
def test_where_a_rank_waits_stands_in_the_stacks(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "conf/algo").mkdir(parents=True)
    (tmp_path / "conf/algo/skipping.yaml").write_text(SKIPPING_ALGO)
    (tmp_path / "skipping.py").write_text(SKIPPING_LOSS)
    trigger = tmp_path / "trigger"
    run = start(
        tmp_path, *SMALL, f"hydra.searchpath=[{tmp_path}/conf]", "algo=skipping", "run.hang_after_s=30",
        f"actor_rollout_ref.actor.policy_loss.trigger={trigger}", "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=50",
    )  # fmt: skip
    run.wait_for("step 2/50", 400)
    trigger.touch()
    assert run.wait(300) == 75
    error = next(line for line in run.output().splitlines() if line.startswith("error: no progress for "))
    assert " during the update of step " in error
    stacks = (run.run_dir / "hang.txt").read_text()
    workers = [text for text in re.split("^the ", stacks, flags=re.M) if text.startswith("FSDP worker ")]
    assert ["barrier" in text and f"loss ({tmp_path}/skipping.py:" in text for text in workers].count(True) == 1
    assert run.left_behind() == []


#: An agent loop of the user's, each of whose responses fails.
BROKEN_LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase

class Broken(AgentLoopBase):
    async def run(self, sampling_params, **row):
        raise ConnectionError("the tool server is down")
"""


@pytest.mark.slow
def test_the_failure_of_every_response_is_said_with_what_an_agent_loop_raised(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "broken_loop.py").write_text(BROKEN_LOOP)
    (tmp_path / "loops.yaml").write_text("[{name: broken, _target_: broken_loop.Broken}]")
    agent = "actor_rollout_ref.rollout.agent"
    run = start(
        tmp_path, *SMALL, f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml", f"{agent}.default_agent_loop=broken"
    )
    assert run.wait(300) == 1
    error = run.output().partition("\nerror: ")[2]
    assert "ConnectionError: the tool server is down" in error and "broken_loop.py" in error, run.output()[-3000:]
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"
    assert run.left_behind() == []


#: verl's agent loop, whose responses go on to the limit while the file is there.
LONG_LOOP = """
import os
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

class Long(SingleTurnAgentLoop):
    async def run(self, sampling_params, **row):
        return await super().run(sampling_params | {{"ignore_eos": os.path.exists({trigger!r})}}, **row)
"""


@pytest.mark.slow
@pytest.mark.nightly  # each finished response is progress: tests/unit/test_hang.py
def test_a_step_with_ten_times_longer_responses_is_no_hang(start: Starter, tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    (tmp_path / "long_loop.py").write_text(LONG_LOOP.format(trigger=str(trigger)))
    (tmp_path / "loops.yaml").write_text("[{name: long, _target_: long_loop.Long}]")
    agent = "actor_rollout_ref.rollout.agent"
    run = start(
        tmp_path, *SMALL, f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml", f"{agent}.default_agent_loop=long",
        "data.max_response_length=480", "trainer.total_training_steps=7",
    )  # fmt: skip
    run.wait_for("step 2/7", 400)
    trigger.touch()
    run.wait_for("step 5/7", 400)  # the generation of the first had begun: some of its responses are long
    trigger.unlink()
    assert run.wait(400) == 0, run.output()[-3000:]
    lengths = {step: metrics["response_length/mean"] for step, metrics in run.steps().items()}
    assert max(lengths.values()) > 8 * min(lengths[1], lengths[2]), lengths
    assert "no progress" not in run.output()
    assert not (run.run_dir / "hang.txt").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_machine_with_four_busy_loops_is_no_hang(start: Starter, tmp_path: Path) -> None:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        run = start(tmp_path, "trainer.total_training_steps=5")
        assert run.wait(580) == 0, run.output()[-3000:]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert "no progress" not in run.output()
    assert not (run.run_dir / "hang.txt").exists()


@pytest.mark.slow
def test_two_runs_on_one_machine_do_not_get_each_others_weights(start: Starter, tmp_path: Path) -> None:
    """Each has a Ray of its own, and in both its first job; verl's sockets in /tmp are named by the job."""
    runs = [
        start(
            tmp_path / str(seed), *SMALL, f"seed={seed}", "trainer.total_training_steps=5", "run.hang_after_s=60",
            "actor_rollout_ref.actor.optim.lr=1e-3",
        )
        for seed in (1, 2)
    ]  # fmt: skip
    for run in runs:
        assert run.wait(500) == 0, run.output()[-3000:]
        for step, metrics in run.steps().items():
            assert metrics["training/rollout_probs_diff_max"] < 1e-3, (step, metrics["training/rollout_probs_diff_max"])
