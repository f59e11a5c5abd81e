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


def load_state(folder: Path, parts: Mapping[str, Stateful], may_differ: bool = False) -> list[str]:
    """Restore what :func:`save_state` wrote, in place; returns the parts that begin afresh.

    These are all parts of a checkpoint of another trainer, whose weights are good. Where settings ``may_differ``, they
    are those that the checkpoint lacks or has of other settings; otherwise these raise ValueError, as does one that
    only the checkpoint has. verl, too, unpickles what it has put beside this file.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return [*parts]
    state = {name: value for name, value in torch.load(path, weights_only=False).items() if value is not None}
    if (differing := sorted(state.keys() ^ parts.keys())) and not may_differ:
        raise ValueError(
            f"{path}: only one of the checkpoint and this run has {', '.join(differing)}: resume with the same algo, "
            "or delete the file to begin afresh"
        )
    afresh = sorted(parts.keys() - state.keys())
    for name in parts.keys() & state.keys():
        try:
            parts[name].load_state_dict(state[name])
        except ValueError:
            if not may_differ:
                raise
            afresh.append(name)
    return afresh
