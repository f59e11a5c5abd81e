"""A disk without room for a checkpoint, on a small file system of its own where one can be mounted."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipe.runner.checkpoints import disk
from recipe.runner.checkpoints.disk import room_for_save, size_of
from recipe.runner.checkpoints.integrity import TRACKER_FILE, latest
from recipe.runner.faults.errors import ExplainedError

MIB = 2**20


def nothing() -> None:
    """There is nothing to delete."""


def save(root: Path, step: int, mib: float = 1.0) -> None:
    """A save as verl's: files first, the tracker last."""
    folder = root / f"global_step_{step}" / "actor"
    folder.mkdir(parents=True)
    torch.save(torch.zeros(int(mib * MIB / 4)), folder / "model_world_size_1_rank_0.pt")
    (root / TRACKER_FILE).write_text(str(step))


def free(monkeypatch: pytest.MonkeyPatch, *mib: float) -> None:
    """Let the next questions for free space be answered so; the last answer stays."""
    answers = [int(value * MIB) for value in mib]
    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=answers.pop(0) if len(answers) > 1 else answers[0])
    )


def test_a_save_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    free(monkeypatch, 0.5)
    with pytest.raises(ExplainedError) as caught, room_for_save(tmp_path, 4, nothing):
        pytest.fail("the save was begun")
    message = str(caught.value)
    assert re.search(r"step 4: 1\.0 MiB .* 0\.5 MiB", message)  # needed and free
    assert f"{tmp_path}/global_step_2" in message  # the last good one
    assert "\n" not in message


def test_room_is_made_before_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    free(monkeypatch, 0.5, 1.5)
    with room_for_save(tmp_path, 6, lambda: shutil.rmtree(tmp_path / "global_step_2")):
        save(tmp_path, 6)
    assert latest(tmp_path) == tmp_path / "global_step_6"


@pytest.mark.parametrize("before", [None, 2])
def test_a_half_written_checkpoint_is_removed(tmp_path: Path, before: int | None) -> None:
    if before:
        save(tmp_path, before)
    with pytest.raises(ExplainedError, match="step 4"), room_for_save(tmp_path, 4, nothing):
        save(tmp_path, 4)
        (tmp_path / TRACKER_FILE).write_text("")  # opened, and then there was no room for a digit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not (tmp_path / "global_step_4").exists()
    assert latest(tmp_path) == (tmp_path / "global_step_2" if before else None)


def test_the_tracker_never_names_a_damaged_checkpoint_instead(tmp_path: Path) -> None:
    for step in (1, 2, 4):
        save(tmp_path, step)
        torch.save(step, tmp_path / f"global_step_{step}" / "data.pt")
    (tmp_path / "global_step_2" / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"cut")
    with room_for_save(tmp_path, 4, nothing):
        assert latest(tmp_path) == tmp_path / "global_step_1"


@pytest.mark.parametrize("before", [None, 2])
def test_a_step_that_is_saved_again_after_going_back_leaves_no_mixture(tmp_path: Path, before: int | None) -> None:
    if before:
        save(tmp_path, before)
        torch.save(before, tmp_path / f"global_step_{before}" / "data.pt")
    save(tmp_path, 4)
    (tmp_path / "global_step_4" / "data.pt").touch()
    with room_for_save(tmp_path, 4, nothing):
        assert latest(tmp_path) == (tmp_path / "global_step_2" if before else None), "what a kill now would leave"
        save(tmp_path, 4)
    assert latest(tmp_path) == tmp_path / "global_step_4"
    assert not (tmp_path / "global_step_4" / "data.pt").exists()


def test_another_error_of_a_save_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), room_for_save(tmp_path, 4, nothing):
        save(tmp_path, 4)
        raise PermissionError("no")
    assert (tmp_path / "global_step_4").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, text=True)
    if not mounted or mounted.returncode:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_what_torch_says_on_a_full_disk_is_understood(small_disk: Path) -> None:
    with room_for_save(small_disk, 1, nothing):
        save(small_disk, 1)
    (small_disk / "other").write_bytes(bytes(MIB // 2))
    says = r"step 2: 1\.0 MiB .* 0\.\d MiB"
    with pytest.raises(ExplainedError, match=says), room_for_save(small_disk, 2, nothing):
        pytest.fail("the save was begun")
    (small_disk / "other").unlink()
    with pytest.raises(ExplainedError, match="step 2"), room_for_save(small_disk, 2, nothing):
        save(small_disk, 2, mib=2.0)  # larger than the one before
    assert latest(small_disk) == small_disk / "global_step_1"
    assert not (small_disk / "global_step_2").exists() and size_of(small_disk) < 1.1 * MIB
