"""Stops a run at the first update whose gradient is not finite, and keeps the batch that did it.

verl 0.9.1 leaves out an optimizer step whose gradient norm is not finite, prints a line in a worker's log and trains
on; one NaN reward can so cost a night. The weights are still good when this raises: nothing has been stepped.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from fspo.data.io import atomic_path


class UpdateNotFinite(RuntimeError):
    """The gradient of a mini-batch is NaN or infinite; the message says where the batch has been saved."""


def check_update(metrics: dict[str, Any], data: Any, folder: Path | None, rank: int) -> None:
    """Raise if the mini-batch just processed has no finite gradient.

    Args:
        metrics: What verl reports of the mini-batch; ``grad_norm`` is the norm over all ranks, so they all agree.
        data: The mini-batch of this rank.
        folder: Where to save it; None: it is not saved.
        rank: Of this process.

    Raises:
        UpdateNotFinite: if the gradient norm is NaN or infinite.
    """
    grad_norm = metrics.get("grad_norm")
    if grad_norm is None or math.isfinite(grad_norm):
        return
    tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
    suspects = sorted(key for key, value in tensors.items() if not _finite(value))
    saved = ""
    if folder is not None:
        path = folder / f"bad_batch_rank{rank}.pt"
        with atomic_path(path) as temporary:
            torch.save(tensors, temporary)
        saved = f" The mini-batch is saved as {path} (torch.load)."
    why = (
        f"not finite in it: {', '.join(suspects)}" if suspects else "its inputs are all finite, so the loss overflowed"
    )
    raise UpdateNotFinite(
        f"the gradient norm of a mini-batch is {grad_norm}: {why}.{saved} The weights have not been touched; look at "
        "the rewards and the learning rate, then start the same command again to go on from the last checkpoint"
    )


def _finite(value: torch.Tensor) -> bool:
    flat = value.values() if value.is_nested else value
    return not flat.is_floating_point() or bool(torch.isfinite(flat).all())
