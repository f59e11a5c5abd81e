"""One run in three starts: asked to stop; resumed from an older checkpoint, because the save was killed, and asked to
stop again; resumed with another learning rate, until its FSDP worker is killed.

What is deterministic goes on as if nothing had happened. Sampled responses do not (docs/runs.md): vLLM's random state
is not part of a checkpoint.
"""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from columns import all_rows, assert_in_force, assert_measured
from real_stack import (
    AGAIN,
    LATER,
    PROBE,
    SMALL,
    SOON,
    Start,
    Starter,
    latest_step,
    measured,
    probed,
    read_probe,
)

from fspo.files import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * LATER)]

RATE = "actor_rollout_ref.actor.optim.lr"
#: A learning rate that is another one at each step, and counts as the full one for the clip values from the first on.
OVERRIDES = (
    *SMALL,
    PROBE,
    "trainer.total_training_steps=1000",
    "trainer.save_freq=2",
    "trainer.max_actor_ckpt_to_keep=9",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "trainer.test_freq=1",  # the probe's reference policy is there at validations
)


def prompts(folder: Path, step: int) -> list[str]:
    """The prompts of a step; verl dumps them in the order of random identifiers."""
    return sorted({row["input"] for row in read_lines(folder / f"rollouts/{step}.jsonl")})


@pytest.fixture(scope="module")
def story(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The three starts, the steps after which the first two have saved, and what was seen of the first."""
    folder = tmp_path_factory.mktemp("three_starts")
    told = SimpleNamespace(folder=folder, starts=[], stopped_after=[])

    def begin(*more: str) -> Start:
        words = (*OVERRIDES, f"trainer.rollout_data_dir={folder}/rollouts", *more)
        told.starts.append(start(folder, *words, **probed(folder)))
        return told.starts[-1]

    def stop_after(step: int) -> None:
        told.starts[-1].wait_for_step(step)
        (folder / "stop").touch()
        told.starts[-1].ends_with(AGAIN)
        told.stopped_after.append(latest_step(folder))

    begin()
    stop_after(3)
    told.prompts = {step: prompts(folder, step) for step in range(1, told.stopped_after[0] + 1)}
    told.measured_before = [value for value in measured(folder)["clip_values_measured"] if value["after_step"] <= 2]
    # As a save that is killed leaves it: verl names a checkpoint the latest once all its files are there.
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    for step in range(3, told.stopped_after[0] + 1):
        for shard in folder.glob(f"global_step_{step}/actor/optim_*.pt"):
            shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    begin()  # the file stop is still there: the next start is rid of it
    stop_after(8)
    third = begin(f"{RATE}=5e-5", f"run.allow_changed=[{RATE}]", "trainer.save_freq=1")
    third.wait_for_step(told.stopped_after[1] + 2)
    worker = next(process for process in third.processes() if "WorkerDict" in " ".join(process.cmdline()))
    told.killed = worker.pid
    worker.send_signal(signal.SIGKILL)
    third.wait(SOON)
    return told


def test_each_start_goes_on_with_whole_weights_until_a_death(story: SimpleNamespace) -> None:
    assert 3 <= story.stopped_after[0] < 8 <= story.stopped_after[1]
    for step, later in ((2, story.starts[1]), (story.stopped_after[1], story.starts[2])):
        assert f"resumed from {story.folder}/global_step_{step}\n" in later.output()
    assert not (story.folder / "stop").exists()
    first = read_probe(story.folder)[story.stopped_after[1] + 1]  # before its first update
    assert np.abs(first["actor"] - first["reference"]).max() > 1e-3, "the reference is the start, the actor is not"
    assert np.abs(first["actor"] - first["rollout"]).max() < 1e-4
    run = story.starts[2]
    assert [entry["status"] for entry in run.info()["starts"]] == ["preempted", "preempted", "failed"]
    assert run.left_behind() == []
    (death,) = re.findall(r"^error: .*FSDP worker \(process (\d+)\) died during the ", run.output(), re.M)
    assert int(death) == story.killed
    assert story.stopped_after[1] < latest_step(story.folder)
    assert run.process.returncode == AGAIN, "a finished step is there"


def test_every_step_has_its_prompts_metrics_and_rows_once(story: SimpleNamespace) -> None:
    steps = [record["step"] for record in read_lines(story.folder / "metrics.jsonl")]
    again = [*range(1, story.stopped_after[0] + 1), *range(3, max(steps) + 1)]
    assert steps in (again, [*range(1, max(steps) + 1)])
    rows = all_rows(story.folder)
    counted = rows[rows["step"] <= max(steps)].groupby(["step", "update"]).size()
    assert [*counted.index] == [(step, update) for step in range(1, max(steps) + 1) for update in (0, 1)]
    assert (counted == 32).all()
    progress = (story.folder / "progress.log").read_text()
    assert all(f"step {step}/1000 " in progress for step in steps)
    for step in range(3, story.stopped_after[0] + 1):
        assert prompts(story.folder, step) == story.prompts[step], "the step that was done again has its prompts"
    epoch = [prompt for step in range(1, 9) for prompt in prompts(story.folder, step)]
    assert len(epoch) == len(set(epoch)) == 64, "each prompt once in an epoch"
    assert set(prompts(story.folder, story.stopped_after[1] + 1)) < set(epoch)


def test_rate_and_clip_values_go_on_with_the_command_s_settings(story: SimpleNamespace) -> None:
    last = {record["step"]: record["metrics"] for record in read_lines(story.folder / "metrics.jsonl")}
    for step, metrics in last.items():
        base = 1e-4 if step <= story.stopped_after[1] else 5e-5
        assert metrics["actor/lr"] == pytest.approx(base * (1 + math.cos(math.pi * step / 1000)) / 2, rel=1e-9), step
    assert len({metrics["actor/lr"] for metrics in last.values()}) == len(last)
    rows, values = all_rows(story.folder), measured(story.folder)["clip_values_measured"]
    assert story.measured_before and values[: len(story.measured_before)] == story.measured_before
    rows = rows[rows["step"] <= max(last)]
    assert_measured(rows, [value for value in values if value["after_step"] <= max(last)])
    assert_in_force(rows, values)
