"""A run that hangs says where, one that gets a signal saves; neither leaves a process behind."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from real_stack import AGAIN, LATER, SMALL, Starter, latest_step, stacks

from recipe.runner.faults.processes import role_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * LATER)]

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
algorithm: {adv_estimator: grpo}
actor_rollout_ref: {actor: {policy_loss: {_target_: skipping.SkippingLossConfig, loss_mode: skipping, trigger: ""}}}
"""


def test_where_a_rank_waits_stands_in_the_stacks(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "conf/algo").mkdir(parents=True)
    (tmp_path / "conf/algo/skipping.yaml").write_text(SKIPPING_ALGO)
    (tmp_path / "skipping.py").write_text(SKIPPING_LOSS)
    trigger = tmp_path / "trigger"
    run = start(
        tmp_path, f"--config-dir={tmp_path}/conf", *SMALL, "algo=skipping", "run.hang_after_s=20",
        f"actor_rollout_ref.actor.policy_loss.trigger={trigger}", "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=1000",
    )  # fmt: skip
    run.wait_for_step(2)
    trigger.touch()
    status = run.wait()
    assert run.left_behind() == []
    (error,) = re.findall(r"^error: (no progress for .*)$", run.output(), re.M)
    step = int(re.search(r" during the update of step (\d+)", error)[1])  # type: ignore[index]
    assert step == max(run.steps()) + 1
    assert run.info()["status"] == "failed" and error[:40] in run.info()["starts"][-1]["error"]
    # faulthandler: File "PATH", line N in loss
    waits = ["barrier" in text and f'"{tmp_path}/skipping.py"' in text for text in stacks(run.output())]
    assert sorted(waits) == [False, True], "one of the two ranks stands in the loss"
    assert status == AGAIN, "a finished step is there"


def test_a_signal_to_all_processes_saves_and_a_second_ends_at_once(start: Starter, tmp_path: Path) -> None:
    """SLURM sends its signals to all processes of a step; Ctrl-C: test_train.py; USR1 to one process: test_async.py."""
    words = (*SMALL, "trainer.total_training_steps=1000", "trainer.save_freq=1000")
    run = start(tmp_path, *words)
    run.wait_for_step(2)
    for process in run.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    run.ends_with(AGAIN)
    saved = latest_step(tmp_path)
    assert saved >= 2 and max(run.steps()) == saved and run.info()["status"] == "preempted"
    run = start(tmp_path, *words)
    run.wait_for_step(saved + 1)
    (worker,) = (process for process in run.processes() if role_of(process.pid) == "FSDP worker")
    worker.suspend()  # the step does not end between the two signals
    for number in (signal.SIGUSR2, signal.SIGTERM):
        run.process.send_signal(number)
        time.sleep(1.5)  # what comes within a second is one signal
    run.ends_with(128 + signal.SIGTERM)
    assert run.info()["status"] == "interrupted" and latest_step(tmp_path) == saved
    assert "Traceback" not in run.output()
