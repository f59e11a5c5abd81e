"""A run that was stopped and resumed against one that was not: what is deterministic is equal.

Not equal are the sampled responses, and with them losses and weights (docs/runs.md says so): vLLM's random state
is not part of a checkpoint.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from columns import all_rows
from real_stack import SMALL, Start, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 8  # so many that a quick machine has not ended when the signal arrives, a second after a step
#: A measured band, over all steps; a learning rate that is another one at each step.
OVERRIDES = (
    *SMALL,
    "algo=fspo_quantile",
    f"fspo.calibration_rounds={STEPS}",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=100",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",  # four mini-batches: few steps without two that have a gradient
)


def begin(start: Starter, folder: Path) -> Start:
    return start(folder, *OVERRIDES, f"trainer.rollout_data_dir={folder}/rollouts")


@pytest.fixture(scope="module")
def uninterrupted(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Start:
    run = begin(start, tmp_path_factory.mktemp("uninterrupted"))
    assert run.wait(400) == 0, run.output()[-4000:]
    return run


@pytest.fixture(scope="module")
def stopped(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> tuple[Start, int, dict[str, Any]]:
    """The start that went on to the end, the step at which the one before was stopped, and the state saved there."""
    folder = tmp_path_factory.mktemp("stopped")
    first = begin(start, folder)
    first.wait_for(f"step 2/{STEPS}", 400)  # the first step has a learning rate of 0, and no band is measured on it
    (folder / "stop").touch()
    assert first.wait(100) == 75, first.output()[-4000:]
    step = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert 0 < step < STEPS
    state = trainer_state(folder, step)
    second = begin(start, folder)
    assert second.wait(400) == 0, second.output()[-4000:]
    assert f"resumed from {folder}/checkpoints/global_step_{step}" in second.output()
    assert f"note: {folder}/stop " in second.output() and not (folder / "stop").exists()
    return second, step, state


def trainer_state(folder: Path, step: int) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"global_step_{step}" / "fspo_state.pt", weights_only=False)


def prompts(run: Start, step: int) -> list[str]:
    """The prompts of a step; verl dumps them in the order of random identifiers."""
    lines = (run.run_dir / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    return sorted(json.loads(line)["input"] for line in lines)


def rows(run: Start) -> list[int]:
    return [json.loads(line)["step"] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_measured(run: Start, last: int = STEPS) -> int:
    """Steps with responses that have a gradient, and come after a moved weight."""
    rows = all_rows(run.run_dir)
    return rows["step"][
        rows["S"].notna() & (rows["A"] != 0) & (rows["minibatch"] > 0) & (rows["step"] <= last)
    ].nunique()


def test_both_end_at_the_same_step(uninterrupted: Start, stopped: tuple[Start, int, Any]) -> None:
    resumed, *_ = stopped
    for run in (uninterrupted, resumed):
        assert rows(run) == list(range(1, STEPS + 1))  # one row a step, none twice
        assert [run.steps()[step]["training/global_step"] for step in rows(run)] == rows(run)
        assert (run.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)


def test_each_step_has_the_same_prompts(uninterrupted: Start, stopped: tuple[Start, int, Any]) -> None:
    resumed, *_ = stopped
    for step in range(1, STEPS + 1):
        assert prompts(resumed, step) == prompts(uninterrupted, step)
    assert prompts(resumed, 1) != prompts(resumed, 2)


def test_the_learning_rate_goes_on_as_if_nothing_had_happened(
    uninterrupted: Start, stopped: tuple[Start, int, Any]
) -> None:
    resumed, *_ = stopped
    rates = [[run.steps()[step]["actor/lr"] for step in range(1, STEPS + 1)] for run in (uninterrupted, resumed)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12)
    assert len(set(rates[0])) == STEPS


def test_the_bands_go_on_with_what_they_had_measured(
    uninterrupted: Start, stopped: tuple[Start, int, dict[str, Any]]
) -> None:
    resumed, step, saved = stopped
    at_the_end = [trainer_state(run.run_dir, STEPS)["band_controller"]["window"] for run in (uninterrupted, resumed)]
    assert [len(window) for window in at_the_end] == [steps_measured(run) for run in (uninterrupted, resumed)]
    assert min(map(len, at_the_end)) > 0
    before = saved["band_controller"]["window"]
    assert len(before) == steps_measured(resumed, step)
    for kept, was in zip(at_the_end[1], before, strict=False):  # the rollout batches of before the stop come first
        np.testing.assert_array_equal(kept, was)


def test_a_shard_with_a_changed_byte_ends_the_start_and_the_next_takes_the_older_checkpoint(
    start: Starter, stopped: tuple[Start, int, dict[str, Any]]
) -> None:
    """Last of this file: it goes on with the run that the others look at."""
    resumed, step, _ = stopped
    shard = resumed.run_dir / f"checkpoints/global_step_{STEPS}/actor/optim_world_size_1_rank_0.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    more = f"trainer.total_training_steps={STEPS + 1}"
    failed = start(resumed.run_dir, *OVERRIDES, more)
    assert failed.wait(400) == 1 and str(shard) in failed.output(), failed.output()[-4000:]
    again = start(resumed.run_dir, *OVERRIDES, more)
    again.wait_for(f"step {step + 1}/", 400)
    assert f"resumed from {resumed.run_dir}/checkpoints/global_step_{step}\n" in again.output()
    assert str(shard) in again.output(), "why"
    again.process.send_signal(signal.SIGINT)
    again.wait(100)
