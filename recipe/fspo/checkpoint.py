"""What this recipe adds to verl's checkpoints: ``fspo_state.pt`` with what a run has measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from fspo.files import atomic_path

STATE_FILE: Final = "fspo_state.pt"


class Stateful(Protocol):
    """A part whose state travels with the weights."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that has to be restored."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it, in place."""


def save_state(folder: Path, parts: Mapping[str, Stateful]) -> None:
    """Write ``fspo_state.pt`` into a checkpoint folder, under a temporary name first."""
    with atomic_path(folder / STATE_FILE) as temporary:
        torch.save({name: part.state_dict() for name, part in parts.items()}, temporary)


def load_state(folder: Path, parts: Mapping[str, Stateful]) -> bool:
    """Restore what :func:`save_state` wrote, in place; False if it has written nothing there.

    verl, too, unpickles what it has put beside this file. Raises ValueError if only one of checkpoint and run has a
    part.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return False  # a checkpoint of another trainer: the weights are good, what is measured begins afresh
    state = torch.load(path, weights_only=False)
    if differing := sorted({name for name in state if state[name] is not None} ^ parts.keys()):
        raise ValueError(
            f"{path}: only one of the checkpoint and this run has {', '.join(differing)}: resume with the same algo, "
            "or delete the file to begin afresh"
        )
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return True
