"""Checkpoints: the one about to be resumed (whole, damaged, half-written, of another size), export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from recipe.runner.checkpoints.integrity import (
    TRACKER_FILE,
    Checkpoint,
    damage_of_rank,
    name_latest,
    remove_old,
    resume_problems,
    resumed_from,
    tracker_repair,
)
from recipe.runner.export import actor_folder, export

KINDS = ("model", "optimizer", "extra")
NAMES = ("model", "optim", "extra_state")


def write_checkpoint(root: Path, step: int, ranks: int = 2, track: bool = True) -> Path:
    """Files as verl's FSDP checkpoint manager names them, written by torch.save as there."""
    folder = root / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    for rank in range(ranks):
        for name in NAMES:
            path = folder / "actor" / f"{name}_world_size_{ranks}_rank_{rank}.pt"
            torch.save({"weights": torch.arange(2000.0), "step": step}, path)
    torch.save({"position": step}, folder / "data.pt")
    torch.save({"random": step}, folder / "fspo_state.pt")
    if track:
        (root / TRACKER_FILE).write_text(str(step))
    return folder


def problems_of(run: DictConfig) -> list[str]:
    return list(resume_problems(run.trainer, KINDS, resumed_from(run.trainer)))


def config(root: Path, ranks: int = 2, mode: str = "auto", path: Path | None = None, of: str = "fspo") -> DictConfig:
    trainer = {"default_local_dir": str(root), "resume_mode": mode, "resume_from_path": path and str(path)}
    trainer |= {"nnodes": 1, "n_gpus_per_node": ranks, "v1": {"trainer_mode": of}}
    return OmegaConf.create({"trainer": trainer})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_first_save_that_was_killed_begins_again(tmp_path: Path) -> None:
    cut(write_checkpoint(tmp_path, 1, track=False) / "data.pt")
    assert tracker_repair(config(tmp_path).trainer, KINDS) is None and problems_of(config(tmp_path)) == []


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", ["actor/optim_world_size_2_rank_1.pt", "data.pt", "fspo_state.pt"])
def test_a_torn_one_is_refused_with_its_file_named(tmp_path: Path, file: str) -> None:
    """Shards of one rank: tests/promises/test_folders.py."""
    older = write_checkpoint(tmp_path, 10)
    newer = write_checkpoint(tmp_path, 20)
    assert problems_of(config(tmp_path)) == []
    cut(newer / file)
    (problem,) = problems_of(config(tmp_path))
    assert str(newer / file) in problem and f"trainer.resume_from_path={older}" in problem


@pytest.fixture
def one_rank() -> Iterator[None]:
    """What a rank's process has made before it loads anything."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_byte_is_seen_by_the_rank_that_loads_it(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, 20, ranks=1)
    shard = folder / f"actor/{name}_world_size_1_rank_0.pt"
    flip(shard)
    assert problems_of(config(tmp_path, ranks=1)) == [], "a start and a save look at the ends of files only"
    (damage,) = damage_of_rank(None, folder / "actor", KINDS)
    assert str(shard) in damage
    if name == "optim":
        assert damage_of_rank(None, folder / "actor", ("model",)) == []


@pytest.mark.parametrize("left", [b"", b"\xff\xfe", None])
def test_an_unreadable_tracker_names_the_newest_whole_again(tmp_path: Path, left: bytes | None) -> None:
    for step in (9, 10, 11):
        write_checkpoint(tmp_path, step)
    cut(tmp_path / "global_step_11/actor/model_world_size_2_rank_1.pt")  # the save of step 11 was killed
    tracker, trainer = tmp_path / TRACKER_FILE, config(tmp_path).trainer
    tracker.write_bytes(left) if left is not None else tracker.unlink()
    note, newest = tracker_repair(trainer, KINDS) or ("", None)
    assert str(tracker) in note and newest == Checkpoint(tmp_path / "global_step_10")
    name_latest(newest)
    assert tracker.read_text() == "10" and problems_of(config(tmp_path)) == []
    assert tracker_repair(trainer, KINDS) is None


def write_queue(checkpoint: Path) -> None:
    (checkpoint / "transfer_queue").mkdir()
    (checkpoint / "transfer_queue" / "metadata.json").touch()


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_unreadable_tracker_with_nothing_whole_is_refused(tmp_path: Path, ranks: int) -> None:
    """The tracker is written last, so a checkpoint was complete once: no silent start from the beginning."""
    damaged = write_checkpoint(tmp_path, 1, ranks=2) / "data.pt"
    cut(damaged)
    (tmp_path / TRACKER_FILE).write_text("")
    assert tracker_repair(config(tmp_path, ranks).trainer, KINDS) is None
    (problem,) = problems_of(config(tmp_path, ranks))
    assert str(tmp_path / TRACKER_FILE) in problem
    assert (str(damaged) if ranks == 2 else "_world_size_2_") in problem


def test_a_pointer_to_nothing_is_refused_and_a_new_run_begins(tmp_path: Path) -> None:
    assert tracker_repair(config(tmp_path).trainer, KINDS) is None
    assert problems_of(config(tmp_path)) == []
    (problem,) = problems_of(config(tmp_path, mode="resume_path", path=tmp_path))
    assert "global_step_N" in problem and Checkpoint(tmp_path).step == 0
    tmp_path.joinpath(TRACKER_FILE).write_text("30")  # verl would begin again without a word
    (problem,) = problems_of(config(tmp_path))
    assert str(tmp_path / "global_step_30") in problem
    assert problems_of(config(tmp_path, mode="disable")) == []


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def test_old_ones_of_earlier_starts_and_half_ones_are_removed(tmp_path: Path) -> None:
    for step in (5, 9, 10, 13, 40):
        write_checkpoint(tmp_path, step, ranks=1)
    (tmp_path / "global_step_best").mkdir()
    remove_old(tmp_path, 13, 2)
    # The two newest up to now, a later one (of a run that was continued from before it), and what is no checkpoint.
    assert left(tmp_path) == {"global_step_10", "global_step_13", "global_step_40", "global_step_best"}
    cut(write_checkpoint(tmp_path, 43, ranks=1, track=False) / "data.pt")  # of a save that was killed
    remove_old(tmp_path, 50, 2)  # before the save of step 50, where there is no room for it
    assert left(tmp_path) == {"global_step_40", "global_step_best"}
    cut(tmp_path / "global_step_40" / "data.pt")
    remove_old(tmp_path, 50, 2)
    assert "global_step_40" in left(tmp_path), "nothing whole would be left"


def test_export_finds_the_latest_finished_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, step, ranks=1)
    latest = tmp_path / "global_step_20" / "actor"
    assert actor_folder(tmp_path) == latest
    earlier = tmp_path / "global_step_10"
    assert actor_folder(earlier) == earlier / "actor"
    shard = next((earlier / "actor").glob("model_world_size_*"))
    flip(shard)
    with pytest.raises(OSError, match=rf"{shard.name} .*global_step_N"):
        export(actor_folder(earlier), tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="global_step_10"):
        actor_folder(tmp_path / "global_step_10" / "actor")


@pytest.mark.parametrize("mode", ["fspo", "fspo_separate_async"])
def test_an_asynchronous_run_s_own_needs_its_prompts(tmp_path: Path, mode: str) -> None:
    folder, run = write_checkpoint(tmp_path, 1), config(tmp_path, of=mode)
    missing = mode == "fspo_separate_async"
    assert [str(folder / "transfer_queue") in problem for problem in problems_of(run)] == [True] * missing
    other = config(tmp_path / "new", mode="resume_path", path=folder, of=mode)
    assert problems_of(other) == [], "a run may begin with one of a synchronous run"
    write_queue(folder)
    assert problems_of(run) == []
