"""A save on a disk without room for it, or that cannot be written: said in one sentence, beforehand if possible.

A checkpoint is about as large as the one before it, so the room for it can be checked beforehand. The first of a run,
or a disk that others fill meanwhile, fails half-way: what was written is removed then, so that the last good checkpoint
stays the one to resume.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from recipe.runner.checkpoints.integrity import (
    TRACKER_FILE,
    latest,
    newest_before,
    restore_tracker,
    step_folder,
    step_of,
)
from recipe.runner.faults.errors import ExplainedError

#: Beyond the size of the last checkpoint: file systems round up, and logs grow during a save.
_MARGIN = 1.02
#: What a file system says that is full, was mounted read-only after an error, fails, or that another host has taken
#: away; and what torch.save says instead of the system's reason.
_FAILED = (
    *(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.ESTALE)),
    "PytorchStreamWriter failed",
    "unexpected pos",
)


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _room(root: Path, good: Path | None) -> str:
    """For a message: what is free, and what is left to resume."""
    kept = f"the last good checkpoint is {good}" if good else "there is no checkpoint before it"
    return f"{shutil.disk_usage(root).free / 2**20:.1f} MiB are free in {root}; {kept}"


def _remove(folder: Path) -> None:
    """Delete a half-written checkpoint, and free its space even where a failed writer still holds a file open."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _clear(root: Path, folder: Path, good: Path | None) -> Path | None:
    """Make place for a step that was saved before, by a run that has gone back since: no mixture of both may be left.

    Returns:
        The checkpoint that the tracker names now, which must not be the one that is written.
    """
    if good == folder:
        good = newest_before(root, step_of(folder))
        if good is None:
            (root / TRACKER_FILE).unlink()
        else:
            restore_tracker(root, good)
    shutil.rmtree(folder)
    return good


@contextmanager
def room_for_save(root: Path, step: int, make_room: Callable[[], None]) -> Iterator[None]:
    """Around a save of ``root/global_step_N``: room is checked before it, and a half-written one removed after.

    Args:
        root: The folder of all checkpoints.
        step: Of the save.
        make_room: Deletes old checkpoints, as after a save; called before it where there is not enough room.

    Raises:
        ExplainedError: if there is not enough room, or was not; if the file system is read-only or fails.
    """
    root.mkdir(parents=True, exist_ok=True)
    good, folder = latest(root), step_folder(root, step)
    needed = _MARGIN * size_of(good) if good else 0
    if shutil.disk_usage(root).free < needed:
        make_room()
        if shutil.disk_usage(root).free < needed:
            raise ExplainedError(
                f"the disk has no room for the checkpoint of step {step}: {needed / 2**20:.1f} MiB are needed (the "
                f"size of the last one) and {_room(root, good)}. Make room before you continue"
            )
    if folder.exists():
        good = _clear(root, folder, good)
    try:
        yield
    except Exception as error:
        why = next((text for text in _FAILED if text in str(error)), None)
        if why is None:
            raise
        message = f"the checkpoint of step {step} cannot be written ({why}): {_room(root, good)}"  # when it failed
        with contextlib.suppress(OSError):  # the next start repairs what cannot be changed now
            _remove(folder)
            if good is not None:
                restore_tracker(root, good)
        raise ExplainedError(f"{message}. Make room, or mend the file system, before you continue") from error
