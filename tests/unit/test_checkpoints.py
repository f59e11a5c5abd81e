"""Checkpoints: the one about to be resumed (whole, damaged, half-written, of another size), export, a full disk.

A pointer to one of which a file is torn: tests/promises/test_folders.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from inside import saved
from messages import holds
from omegaconf import DictConfig, OmegaConf

from recipe.runner.checkpoints import disk
from recipe.runner.checkpoints.disk import room_for_save
from recipe.runner.checkpoints.integrity import (
    TRACKER_FILE,
    Checkpoint,
    damage_of_rank,
    latest,
    name_latest,
    remove_old,
    resume_problems,
    resumed_from,
    tracker_repair,
)
from recipe.runner.export import actor_folder, export
from recipe.runner.faults.errors import ExplainedError

KINDS = ("model", "optimizer", "extra")


def trainer(root: Path, ranks: int = 1, begins_with: Path | None = None, mode: str = "fspo") -> DictConfig:
    """The settings of a run in this folder."""
    of_resume = {"resume_mode": "resume_path" if begins_with else "auto", "resume_from_path": str(begins_with)}
    machine = {"nnodes": 1, "n_gpus_per_node": ranks, "v1": {"trainer_mode": mode}}
    return OmegaConf.create({"default_local_dir": str(root), **of_resume, **machine})


def problems_of(run: DictConfig) -> list[str]:
    return list(resume_problems(run, KINDS, resumed_from(run)))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "kind"), [("model", "model"), ("optim", "optimizer"), ("extra_state", "extra")])
def test_a_changed_byte_is_seen_by_the_rank_that_loads_it(tmp_path: Path, name: str, kind: str) -> None:
    folder = saved(tmp_path, 20)
    shard = folder / f"actor/{name}_world_size_1_rank_0.pt"
    flip(shard)
    assert problems_of(trainer(tmp_path)) == [], "a start and a save look at the ends of files only"
    (damage,) = damage_of_rank(None, folder / "actor", KINDS)
    assert str(shard) in damage
    assert damage_of_rank(None, folder / "actor", [other for other in KINDS if other != kind]) == []


@pytest.mark.parametrize("left", [b"", b"\xff\xfe", None])
def test_an_unreadable_tracker_names_the_newest_whole_again(tmp_path: Path, left: bytes | None) -> None:
    for step in (9, 10, 11):
        saved(tmp_path, step)
    cut(tmp_path / "global_step_11/actor/model_world_size_1_rank_0.pt")  # the save of step 11 was killed
    tracker, run = tmp_path / TRACKER_FILE, trainer(tmp_path)
    tracker.write_bytes(left) if left is not None else tracker.unlink()
    note, newest = tracker_repair(run, KINDS) or ("", None)
    assert str(tracker) in note and newest == Checkpoint(tmp_path / "global_step_10")
    name_latest(newest)
    assert tracker.read_text() == "10" and problems_of(run) == [] and tracker_repair(run, KINDS) is None


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_unreadable_tracker_with_nothing_whole_is_refused(tmp_path: Path, ranks: int) -> None:
    """The tracker is written last, so a checkpoint was complete once: no silent start from the beginning."""
    damaged, run = saved(tmp_path, 1, ranks=2) / "actor/optim_world_size_2_rank_1.pt", trainer(tmp_path, ranks)
    assert problems_of(trainer(tmp_path, ranks=2)) == []
    cut(damaged)
    (tmp_path / TRACKER_FILE).write_text("")
    assert tracker_repair(run, KINDS) is None
    (problem,) = problems_of(run)
    assert str(tmp_path / TRACKER_FILE) in problem
    assert (str(damaged) if ranks == 2 else "_world_size_2_") in problem
    (tmp_path / TRACKER_FILE).unlink()  # of a first save that was killed: it begins again
    assert tracker_repair(run, KINDS) is None and problems_of(run) == []


def test_a_pointer_to_nothing_is_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(trainer(tmp_path, begins_with=tmp_path))
    assert "global_step_N" in problem and Checkpoint(tmp_path).step == 0
    tmp_path.joinpath(TRACKER_FILE).write_text("30")  # verl would begin again without a word
    (problem,) = problems_of(run := trainer(tmp_path))
    assert str(tmp_path / "global_step_30") in problem
    run.resume_mode = "disable"
    assert problems_of(run) == []


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def test_old_ones_of_earlier_starts_and_half_ones_are_removed(tmp_path: Path) -> None:
    for step in (5, 9, 10, 13, 40):
        saved(tmp_path, step)
    (tmp_path / "global_step_best").mkdir()
    remove_old(tmp_path, 13, 2)
    # The two newest up to now, a later one (of a run that was continued from before it), and what is no checkpoint.
    assert left(tmp_path) == {"global_step_10", "global_step_13", "global_step_40", "global_step_best"}
    cut(saved(tmp_path, 43) / "data.pt")  # of a save that was killed
    (tmp_path / TRACKER_FILE).write_text("40")
    remove_old(tmp_path, 50, 2)  # before the save of step 50, where there is no room for it
    assert left(tmp_path) == {"global_step_40", "global_step_best"}
    cut(tmp_path / "global_step_40" / "data.pt")
    remove_old(tmp_path, 50, 2)
    assert "global_step_40" in left(tmp_path), "nothing whole would be left"


def test_export_finds_the_latest_finished_checkpoint(tmp_path: Path) -> None:
    earlier, newest = (saved(tmp_path, step) for step in (10, 20))
    assert actor_folder(tmp_path) == newest / "actor" and actor_folder(earlier) == earlier / "actor"
    shard = earlier / "actor/model_world_size_1_rank_0.pt"
    flip(shard)
    with pytest.raises(OSError, match=rf"{shard.name} .*global_step_N"):
        export(actor_folder(earlier), tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="global_step_10"):
        actor_folder(earlier / "actor")


@pytest.mark.parametrize("mode", ["fspo", "fspo_separate_async"])
def test_an_asynchronous_run_s_own_needs_its_prompts(tmp_path: Path, mode: str) -> None:
    folder, run = saved(tmp_path, 1), trainer(tmp_path, mode=mode)
    missing = mode == "fspo_separate_async"
    assert [str(folder / "transfer_queue") in problem for problem in problems_of(run)] == [True] * missing
    other = trainer(tmp_path / "new", begins_with=folder, mode=mode)
    assert problems_of(other) == [], "a run may begin with one of a synchronous run"
    (folder / "transfer_queue").mkdir()
    (folder / "transfer_queue" / "metadata.json").touch()
    assert problems_of(run) == []


# A save on a disk without room.
MIB = 2**20


def save(root: Path, step: int, mib: float = 1.0) -> None:
    """A save as verl's: files first, the tracker last."""
    folder = root / f"global_step_{step}" / "actor"
    folder.mkdir(parents=True)
    torch.save(torch.zeros(int(mib * MIB / 4)), folder / "model_world_size_1_rank_0.pt")
    (root / TRACKER_FILE).write_text(str(step))


def test_a_save_without_room_is_refused_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB // 2))
    said = holds("step 4", "1.0 MiB", "0.5 MiB", f"{tmp_path}/global_step_2")
    with pytest.raises(ExplainedError, match=said), room_for_save(tmp_path, 4):
        pytest.fail("the save was begun")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_a_half_written_checkpoint_is_removed(tmp_path: Path, code: int) -> None:
    for good in (None, Checkpoint(tmp_path / "global_step_2")):
        if good is not None:
            save(tmp_path, 2)
        with pytest.raises(ExplainedError, match="step 4"), room_for_save(tmp_path, 4):
            save(tmp_path, 4)  # verl has noted it already
            raise OSError(code, os.strerror(code))
        assert not (tmp_path / "global_step_4").exists() and latest(tmp_path) == good


def test_what_torch_says_on_a_full_disk_is_understood(small_disk: Callable[[Path, int], None], tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    small_disk(folder, 2500)
    with room_for_save(folder, 1):
        save(folder, 1)
    with pytest.raises(ExplainedError, match="step 2"), room_for_save(folder, 2):
        save(folder, 2, mib=2.0)  # larger than the one before
    assert latest(folder) == Checkpoint(folder / "global_step_1")
    assert not (folder / "global_step_2").exists()
