"""The checkpoint that a run is about to resume: whole, damaged, half-written, of another size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.fspo.checkpoints.integrity import (
    TRACKER_FILE,
    archive_damage,
    checkpoint_damage,
    newest_complete,
    remove_old,
    repair_tracker,
    resume_problems,
)

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


def config(root: Path, ranks: int = 2, mode: str = "auto", path: Path | None = None) -> DictConfig:
    trainer = {
        "default_local_dir": str(root),
        "resume_mode": mode,
        "resume_from_path": str(path) if path else None,
        "nnodes": 1,
        "n_gpus_per_node": ranks,
    }
    actor = {"checkpoint": {"load_contents": list(KINDS)}}
    return OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"actor": actor}})


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (cut, "is damaged"),
        (flip, "is damaged"),
        (lambda path: path.write_bytes(b"not an archive" * 100), "is damaged"),
    ],
)
@pytest.mark.parametrize("file", ["actor/optim_world_size_2_rank_1.pt", "data.pt"])
def test_a_damaged_checkpoint_is_refused_with_its_file_named(tmp_path: Path, file: str, spoil, says: str) -> None:
    older = write_checkpoint(tmp_path, 10)
    newer = write_checkpoint(tmp_path, 20)
    assert list(resume_problems(config(tmp_path))) == []
    spoil(newer / file)
    (problem,) = resume_problems(config(tmp_path))
    assert str(newer / file) in problem and says in problem
    assert f"trainer.resume_from_path={older}" in problem
    assert list(resume_problems(config(tmp_path, mode="resume_path", path=older))) == []


def test_large_files_are_checked_by_their_directory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    torch.save({"weights": torch.arange(2000.0)}, path)
    monkeypatch.setattr("recipe.fspo.checkpoints.integrity._FULL_CHECK_BYTES", 100)
    assert archive_damage(path) is None
    cut(path)
    assert archive_damage(path) is not None


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, ranks=2)
    (problem,) = resume_problems(config(tmp_path, ranks=4))
    assert "saved by 2 FSDP rank(s) and this run has 4" in problem


def test_a_plain_verl_checkpoint_needs_no_state_of_ours(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 10)
    (folder / "fspo_state.pt").unlink()
    assert checkpoint_damage(folder, 2, KINDS) == []


def test_contents_that_are_not_loaded_are_not_needed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 10)
    (folder / "actor" / "optim_world_size_2_rank_0.pt").unlink()
    assert checkpoint_damage(folder, 2, ("model", "extra")) == []
    assert len(checkpoint_damage(folder, 2, KINDS)) == 1


@pytest.mark.parametrize("left", [b"", b"twenty", b"\xff\xfe", None])
def test_an_unreadable_tracker_names_the_newest_complete_checkpoint_again(tmp_path: Path, left: bytes | None) -> None:
    write_checkpoint(tmp_path, 9)
    write_checkpoint(tmp_path, 10)
    killed_in_its_save = write_checkpoint(tmp_path, 11)
    cut(killed_in_its_save / "actor" / "model_world_size_2_rank_1.pt")
    tracker = tmp_path / TRACKER_FILE
    tracker.write_bytes(left) if left is not None else tracker.unlink()
    said = repair_tracker(config(tmp_path))
    assert said is not None and str(tracker) in said and "global_step_10" in said
    assert tracker.read_text() == "10"
    assert list(resume_problems(config(tmp_path))) == []
    assert repair_tracker(config(tmp_path)) is None


def test_a_save_killed_in_the_middle_leaves_the_previous_checkpoint_to_resume(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    killed_in_its_save = write_checkpoint(tmp_path, 20, track=False)
    (killed_in_its_save / "data.pt").unlink()
    cut(killed_in_its_save / "actor" / "optim_world_size_2_rank_0.pt")
    assert repair_tracker(config(tmp_path)) is None
    assert list(resume_problems(config(tmp_path))) == []
    assert newest_complete(tmp_path, 2, KINDS) == tmp_path / "global_step_10"


def test_a_first_save_killed_in_the_middle_begins_again_and_says_so(tmp_path: Path) -> None:
    cut(write_checkpoint(tmp_path, 1, track=False) / "data.pt")
    said = repair_tracker(config(tmp_path))
    assert said is not None and "starting from the beginning" in said
    assert not (tmp_path / TRACKER_FILE).exists()
    assert list(resume_problems(config(tmp_path))) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_unreadable_tracker_beside_what_cannot_be_resumed_is_refused(tmp_path: Path, ranks: int) -> None:
    """The tracker is written last, so a checkpoint was complete once: no silent start from the beginning."""
    damaged = write_checkpoint(tmp_path, 1, ranks=2) / "data.pt"
    cut(damaged)
    (tmp_path / TRACKER_FILE).write_text("")
    assert repair_tracker(config(tmp_path, ranks)) is None
    (problem,) = resume_problems(config(tmp_path, ranks))
    assert str(tmp_path / TRACKER_FILE) in problem
    assert (str(damaged) if ranks == 2 else "saved by 2 FSDP rank(s)") in problem


def test_a_new_run_has_nothing_to_say(tmp_path: Path) -> None:
    assert repair_tracker(config(tmp_path / "checkpoints")) is None
    assert list(resume_problems(config(tmp_path / "checkpoints"))) == []


def test_a_tracker_without_its_folder_is_refused(tmp_path: Path) -> None:
    """verl would begin again without a word."""
    tmp_path.joinpath(TRACKER_FILE).write_text("30")
    (problem,) = resume_problems(config(tmp_path))
    assert f"{tmp_path / 'global_step_30'} does not exist" in problem


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (problem,) = resume_problems(config(tmp_path, mode="resume_path", path=tmp_path))
    assert "global_step_N" in problem


def test_resume_mode_disable_looks_at_nothing(tmp_path: Path) -> None:
    cut(write_checkpoint(tmp_path, 1) / "data.pt")
    assert list(resume_problems(config(tmp_path, mode="disable"))) == []


def test_old_checkpoints_of_earlier_starts_are_removed(tmp_path: Path) -> None:
    folders = {step: write_checkpoint(tmp_path, step, ranks=1) for step in (5, 9, 10, 13, 40)}
    (tmp_path / "global_step_best").mkdir()
    assert remove_old(tmp_path, step=13, keep=2) == [folders[9], folders[5]]
    # The two newest up to now, a later one (of a run that was continued from before it), and what is no checkpoint.
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {"global_step_10", "global_step_13", "global_step_40", "global_step_best"}
    assert remove_old(tmp_path, step=13, keep=2) == []
