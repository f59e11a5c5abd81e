"""What this recipe adds to verl's checkpoints: the state of its own parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from fspo.files import atomic_path

STATE_FILE: Final = "fspo_state.pt"
_KINDS: Final = ("bool", "int32", "int64", "uint32", "float32", "float64")
#: What a pickled array or number of numpy is made of.
_ARRAYS: Final = [
    *(np._core.multiarray._reconstruct, np._core.multiarray.scalar, np.ndarray, np.dtype),
    *(type(np.dtype(kind)) for kind in _KINDS),
]


class Stateful(Protocol):
    """A part whose state travels with the weights."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that has to be restored."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it, in place."""


def save_state(folder: Path, parts: Mapping[str, Stateful | None]) -> None:
    """Write ``fspo_state.pt`` into a checkpoint folder, under a temporary name first. A part may be absent (None)."""
    state = {name: None if part is None else part.state_dict() for name, part in parts.items()}
    with atomic_path(folder / STATE_FILE) as temporary:
        torch.save(state, temporary)


def read_state(folder: Path) -> dict[str, Any] | None:
    """What :func:`save_state` wrote, by the names of the parts; None if it has written nothing there.

    Raises:
        ValueError: if the file is damaged.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        # Without a pickle's code. Torch has to be told of numpy's arrays.
        with torch.serialization.safe_globals(_ARRAYS):
            state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:
        why = str(error).partition(". ")[0]  # torch goes on about how to run what is in it
        raise ValueError(
            f"{path} is damaged ({why}): resume from an older checkpoint with trainer.resume_mode=resume_path "
            "trainer.resume_from_path=.../global_step_N, or delete this file to begin the statistics afresh"
        ) from error
    return state


def load_state(folder: Path, parts: Mapping[str, Stateful | None]) -> bool:
    """Restore what :func:`save_state` wrote, in place; False if it has written nothing there.

    Raises:
        ValueError: if the file is damaged, or only one of checkpoint and run has a part.
    """
    path = folder / STATE_FILE
    if (state := read_state(folder)) is None:
        return False  # a checkpoint of another trainer: the weights are good, the statistics begin afresh
    for name, part in parts.items():
        if name not in state:
            continue  # saved before there was such a part: it begins afresh
        if (state[name] is None) != (part is None):
            raise ValueError(
                f"{path} was saved {'without' if state[name] is None else 'with'} a {name}, and this run is "
                f"{'with' if state[name] is None else 'without'} one: resume with the same algo, or delete the file to "
                "begin afresh"
            )
        if part is not None:
            part.load_state_dict(state[name])
    return True
