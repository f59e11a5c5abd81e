"""Two ranks: a run that hangs says where, one that gets a signal saves; neither leaves a process behind."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from columns import all_rows
from real_stack import (
    AGAIN,
    LATER,
    PROBE,
    SMALL,
    Start,
    Starter,
    assert_vllm_follows,
    latest_step,
    probed,
    read_probe,
    stacks,
)

from recipe.runner.faults.processes import role_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * LATER)]


def ranks(run: Start) -> list[psutil.Process]:
    return [process for process in run.processes() if role_of(process.pid) == "FSDP worker"]


#: A policy loss in which one rank enters a collective that the other skips, once the file is there.
SKIPPING_LOSS = """
from pathlib import Path
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss

@register_policy_loss("skipping")
def loss(*tensors, config, **named):
    if Path(__file__).with_name("trigger").exists() and torch.distributed.get_rank() == 1:
        torch.distributed.barrier()
    return get_policy_loss_fn("vanilla")(*tensors, config=config, **named)
"""


def test_where_a_rank_waits_stands_in_the_stacks(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "skipping.py").write_text(SKIPPING_LOSS)
    run = start(
        tmp_path, *SMALL, "algo=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=skipping", "run.hang_after_s=40",
        "actor_rollout_ref.model.external_lib=skipping", "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=1000",
    )  # fmt: skip
    run.wait_for_step(2)
    (tmp_path / "trigger").touch()
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


def test_ctrl_c_saves_on_two_ranks_and_a_second_signal_ends_at_once(start: Starter, tmp_path: Path) -> None:
    """TERM to all processes: test_async.py, test_slurm.py."""
    words = (
        *SMALL, PROBE, "algo=rloo", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1000",
        "trainer.save_freq=2", "actor_rollout_ref.actor.use_kl_loss=true",
    )  # fmt: skip
    run = start(tmp_path, *words, **probed(tmp_path))
    run.wait_for_step(2)
    assert len(ranks(run)) == 2
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does, to the whole process group
    run.ends_with(128 + signal.SIGINT)
    steps, saved = run.steps(), latest_step(tmp_path)
    assert [*steps] == [*range(1, saved + 1)] and saved >= 2
    assert run.info()["status"] == "interrupted" and "Traceback" not in run.output()
    for step in (1, 2):
        assert steps[step]["training/rollout_probs_diff_mean"] < 1e-5
        assert all(math.isfinite(steps[step][name]) for name in ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss"))
    assert_vllm_follows(read_probe(tmp_path)[2])
    assert (all_rows(tmp_path).groupby(["step", "update"]).size() == 32).all()  # both ranks' rows

    run = start(tmp_path, *words, "trainer.save_freq=1000", **probed(tmp_path))
    run.wait_for_step(saved + 1)
    ranks(run)[0].suspend()  # the step does not end between the two signals
    for number in (signal.SIGUSR2, signal.SIGTERM):
        run.process.send_signal(number)
        time.sleep(1.5)  # what comes within a second is one signal
    run.ends_with(128 + signal.SIGTERM)
    assert run.info()["status"] == "interrupted" and latest_step(tmp_path) == saved
    assert "Traceback" not in run.output()
