"""A save on a disk without room for it, or that cannot be written: the last good checkpoint stays the one to resume."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from recipe.runner.checkpoints.integrity import latest, name_latest, step_folder
from recipe.runner.faults.errors import ExplainedError

#: Beyond the size of the last checkpoint: file systems round up, and logs grow during a save.
_MARGIN = 1.02
#: Of a file system that is full, fails or is no longer mounted; and of torch.save, which does not give the system's.
_FAILED = (
    *(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.ESTALE)),
    "PytorchStreamWriter failed",
    "unexpected pos",
)


@contextlib.contextmanager
def room_for_save(root: Path, step: int) -> Iterator[None]:
    """Around a save of ``root/global_step_N``: room, as the last one took, is checked before it, and a half-written one
    removed after it. Raises ExplainedError if there is none, or the file system fails.
    """

    def refusal(why: str) -> ExplainedError:
        return ExplainedError(
            f"the checkpoint of step {step} cannot be written ({why}): {shutil.disk_usage(root).free / 2**20:.1f} MiB "
            f"are free in {root}; the last good checkpoint: {good or 'none'}. Make room, or mend the file system, "
            "before going on"
        )

    good, folder = latest(root), step_folder(root, step)
    needed = _MARGIN * sum(path.lstat().st_size for path in good.folder.rglob("*")) if good else 0
    if shutil.disk_usage(root).free < needed:
        raise refusal(f"the last one has {needed / 2**20:.1f} MiB")
    if folder.exists():
        shutil.rmtree(folder)  # of a run that has gone back since: no mixture of both may be left
    try:
        yield
    except Exception as error:
        why = next((text for text in _FAILED if text in str(error)), None)
        if why is None:
            raise
        explained = refusal(why)  # with the room that there was when it failed
        shutil.rmtree(folder, ignore_errors=True)
        if good is not None:  # verl may have registered the new one already
            with contextlib.suppress(OSError):
                name_latest(good)
        raise explained from error
