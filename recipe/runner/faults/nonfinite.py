"""Stops a run at the first mini-batch that cannot give a finite update, before the step, and keeps the batch.

verl 0.9.1 leaves out such a step, prints a line in a worker's log and trains on; one NaN reward can so cost a night.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fspo.files import atomic_path
from recipe.runner.faults.errors import ExplainedError


class UpdateRefused(ExplainedError):
    """A mini-batch would have spoiled the weights; the message says why and where the batch has been saved."""


@contextmanager
def guarded_update(
    data: Any, folder: Path, rank: int, refused: type[Exception], may_skip: bool = False
) -> Iterator[dict[str, Any]]:
    """Around the processing of one mini-batch; the caller puts verl's metrics of it into the yielded dictionary.

    A bad one is saved in ``folder``. ``refused`` is what a loss raises for rows that it cannot use; with ``may_skip`` a
    gradient that is not finite only skips the step, as a gradient scaler means it to. Raises UpdateRefused if the loss
    refuses the mini-batch, or if ``grad_norm``, over all ranks, is not finite.
    """
    metrics: dict[str, Any] = {}
    try:
        yield metrics
    except refused as error:
        raise UpdateRefused(f"the loss refuses a mini-batch: {error}. {_save(data, folder, rank)}") from error
    grad_norm = metrics.get("grad_norm")
    if grad_norm is None or math.isfinite(grad_norm) or may_skip:
        return
    flat = {key: value.values() if value.is_nested else value for key, value in _tensors(data).items()}
    suspects = sorted(key for key, value in flat.items() if not torch.isfinite(value).all())
    why = f"not finite in it: {', '.join(suspects)}" if suspects else "its inputs are all finite"
    raise UpdateRefused(f"the gradient norm of a mini-batch is {grad_norm}: {why}. {_save(data, folder, rank)}")


def _save(data: Any, folder: Path, rank: int) -> str:
    """Save the tensors of a mini-batch, and say where, and what to do."""
    path = folder / f"bad_batch_rank{rank}.pt"
    with atomic_path(path) as temporary:
        torch.save(_tensors(data), temporary)
    return (
        f"The mini-batch is saved as {path} (torch.load). The weights have not been touched; look at rewards and "
        "learning rate before you continue"
    )


def _tensors(data: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
