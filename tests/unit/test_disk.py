"""A disk without room for a checkpoint, on a small file system of its own where one can be mounted."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from messages import holds

from recipe.runner.checkpoints import disk
from recipe.runner.checkpoints.disk import room_for_save
from recipe.runner.checkpoints.integrity import TRACKER_FILE, Checkpoint, latest
from recipe.runner.faults.errors import ExplainedError

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
    def save_4() -> None:
        with pytest.raises(ExplainedError, match="step 4"), room_for_save(tmp_path, 4):
            save(tmp_path, 4)  # verl has noted it already
            raise OSError(code, os.strerror(code))
        assert not (tmp_path / "global_step_4").exists()

    save_4()
    save(tmp_path, 2)
    save_4()
    assert latest(tmp_path) == Checkpoint(tmp_path / "global_step_2")


def test_what_torch_says_on_a_full_disk_is_understood(small_disk: Callable[[Path, int], None], tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    small_disk(folder, 2500)
    with room_for_save(folder, 1):
        save(folder, 1)
    with pytest.raises(ExplainedError, match="step 2"), room_for_save(folder, 2):
        save(folder, 2, mib=2.0)  # larger than the one before
    assert latest(folder) == Checkpoint(folder / "global_step_1")
    assert not (folder / "global_step_2").exists()
