"""The small parts of a run: resources, progress lines, run log, trainer state, export's choice of a checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from fspo.calibration import BandController
from fspo.diagnostics import LengthDiagnostics
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.sums import SequenceSums
from fspo.types import BandState, SequenceLossOutput
from recipe.fspo.checkpoints.state import STATE_FILE, load_state, save_state
from recipe.fspo.export import actor_folder
from recipe.fspo.faults.resources import Needs, missing, needs_of
from recipe.fspo.launch.compose import compose
from recipe.fspo.launch.progress import Progress, step_line, validation_line
from recipe.fspo.launch.run_folder import RunLog
from recipe.fspo.recorder import Recorder


def test_needs_follow_the_configuration() -> None:
    assert needs_of(compose()) == Needs(nodes=1, gpus_per_node=1, cpus=9)
    two = compose(["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.agent.num_workers=4"])
    assert needs_of(two) == Needs(nodes=1, gpus_per_node=2, cpus=15)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([], "2 node(s) with 8 GPU(s) each are needed"),
        ([{"GPU": 8, "CPU": 64}], "the 1 node(s) in Ray have: 8"),
        ([{"GPU": 8, "CPU": 64}, {"GPU": 4, "CPU": 64}], "have: 8, 4"),
        ([{"GPU": 8, "CPU": 20}, {"GPU": 8, "CPU": 20}], "48 CPUs are needed, Ray has 40"),
        ([{"GPU": 8, "CPU": 24}, {"GPU": 8, "CPU": 24}], None),
    ],
)
def test_what_is_missing_is_said(nodes: list[dict[str, float]], says: str | None) -> None:
    found = missing(Needs(nodes=2, gpus_per_node=8, cpus=48), nodes)
    assert found is None if says is None else says in found


def test_progress_is_read_from_an_index() -> None:
    progress = Progress()
    progress.say("a")
    progress.say("b")
    assert [line.split("] ")[1] for line in progress.since(0)] == ["a", "b"]
    assert len(progress.since(1)) == 1 and progress.since(2) == []


def test_lines_leave_out_what_was_not_measured() -> None:
    assert step_line(3, 20, {"critic/rewards/mean": 0.5, "fspo/lre_debiased": None}) == "step 3/20  reward 0.500"
    assert validation_line(3, {"critic/rewards/mean": 0.5}) == ""
    assert validation_line(3, {"val-core/a/b/acc/mean@1": 0.25}) == "held-out after step 3:  a/b/acc/mean@1 0.250"


def micro_batch(seed: int) -> SequenceLossOutput:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 8, generator=generator)
    new = old + 0.1 * torch.randn(4, 8, generator=generator)
    mask = torch.arange(8) < torch.tensor([8, 5, 2, 0])[:, None]
    return sequence_policy_loss(new, old, torch.ones(4, 8), mask, ALGORITHMS["fspo"])


def test_recorder_separates_mini_batches_and_joins_micro_batches() -> None:
    recorder = Recorder()
    recorder.begin_mini_batch()
    recorder.add(micro_batch(0))
    assert recorder.pop() == []  # plain verl never enables it
    recorder.enable(max_response_length=8)
    for mini_batch in ([0, 1], [2]):
        recorder.begin_mini_batch()
        for seed in mini_batch:
            recorder.add(micro_batch(seed))
    first, second = (SequenceSums.from_numpy(*arrays) for arrays in recorder.pop())
    assert (first.total("count"), second.total("count")) == (6, 3)
    assert (first.total("truncated"), second.total("truncated")) == (2, 1)
    assert recorder.pop() == []


def test_band_state_follows_the_mini_batch() -> None:
    recorder = Recorder()
    recorder.enable(max_response_length=8)
    recorder.band_state = BandState(drift_by_mini_batch=(0.0, 0.5))
    for expected in (0.0, 0.5, 0.5):
        recorder.begin_mini_batch()
        state = recorder.current_band_state()
        assert state is not None and state.drift_per_token == expected


def test_run_log_appends_and_writes_only_numbers(tmp_path: Path) -> None:
    config = OmegaConf.create({"fspo": {"run_dir": str(tmp_path)}})
    log = RunLog(config, total_steps=2)
    log.log({"a": np.float64(1.5), "b": float("nan"), "c": np.int64(2)}, step=1)
    RunLog(config, total_steps=2).log({"a": 2.0}, step=2)  # a resumed run
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "metrics": {"a": 1.5, "b": None, "c": 2}}, {"step": 2, "metrics": {"a": 2.0}}]


def sums(seed: int) -> SequenceSums:
    return SequenceSums.zeros().add_(micro_batch(seed))


def test_trainer_state_survives_a_restart(tmp_path: Path) -> None:
    def parts() -> tuple[LengthDiagnostics, BandController]:
        return LengthDiagnostics(bins=2, window=3), BandController(ALGORITHMS["fspo_quantile"], min_count=1)

    diagnostics, controller = parts()
    for step in range(3):
        diagnostics.update([sums(step), sums(step + 10)])
        controller.update([sums(step), sums(step + 10)])
    save_state(tmp_path, {"diagnostics": diagnostics, "band_controller": controller})
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    restored, restored_controller = parts()
    load_state(tmp_path, {"diagnostics": restored, "band_controller": restored_controller})
    assert restored_controller.state == controller.state
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())
    following = [sums(5), sums(15)]
    assert restored.update(following) == diagnostics.update(following)


def test_damaged_or_foreign_trainer_state_is_refused(tmp_path: Path) -> None:
    fixed = {"diagnostics": LengthDiagnostics(), "band_controller": None}
    load_state(tmp_path, fixed)  # a checkpoint of plain verl has no such file
    save_state(tmp_path, fixed)
    with pytest.raises(ValueError, match="saved without a band_controller, and this run is with one"):
        load_state(tmp_path, fixed | {"band_controller": BandController(ALGORITHMS["fspo_adaptive"])})
    (tmp_path / STATE_FILE).write_bytes((tmp_path / STATE_FILE).read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{STATE_FILE} is damaged"):
        load_state(tmp_path, fixed)


def test_export_finds_the_latest_finished_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20):
        actor = tmp_path / "checkpoints" / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").touch()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    latest = tmp_path / "checkpoints" / "global_step_20" / "actor"
    assert actor_folder(tmp_path) == latest
    assert actor_folder(tmp_path / "checkpoints") == latest
    earlier = tmp_path / "checkpoints" / "global_step_10"
    assert actor_folder(earlier) == earlier / "actor"
    with pytest.raises(FileNotFoundError, match="no finished checkpoint"):
        actor_folder(tmp_path / "checkpoints" / "global_step_10" / "actor")
