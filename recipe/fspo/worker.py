"""verl's hybrid worker, subclassed at its public class attributes: the rows of each mini-batch reach the trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import recipe.fspo.sqrt_mask  # noqa: F401  (a rule that verl applies in the trainer, and here with bypass_mode)
import torch
from recipe.fspo.policy_loss import observe_losses
from recipe.fspo.recorder import RECORDER, ROWS, MiniBatch

from fspo.types import BandState
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


def _with_rows(loss_fn: Callable[..., Any], model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """``loss_fn``, after the recorder has been given what verl does not hand to a policy loss: which rows these are."""
    row_B = data.get(ROWS, None)
    if row_B is not None and row_B.is_nested:  # how TransferQueue hands out every column, of equal rows too
        row_B = torch.stack(row_B.unbind())
    RECORDER.begin_micro_batch(None if row_B is None else row_B.flatten())
    return loss_fn(model_output=model_output, data=data, dp_group=dp_group)


class RecordingTrainingWorker(TrainingWorker):
    """``TrainingWorker`` that tells the recorder where one mini-batch ends, and which rows its sequences are."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        super().set_loss_fn(partial(_with_rows, loss_fn))

    def train_batch(self, data: Any) -> Any:
        RECORDER.begin_mini_batch()
        learning_rate = float(self.engine.optimizer.param_groups[0]["lr"])
        output = super().train_batch(data)
        metrics = {} if output is None else tu.get(output, "metrics")
        RECORDER.end_mini_batch(metrics.get("grad_norm"), learning_rate)
        return output


class FSPOWorker(ActorRolloutRefWorker):
    """``ActorRolloutRefWorker`` with the calls that the trainer adds: rows out, band state in."""

    actor_worker_cls = RecordingTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def record(self) -> None:
        """Record from now on, as at the start of a training; all losses are registered by then."""
        observe_losses()
        RECORDER.enable(self.config.rollout.response_length)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_update(self, band_state: BandState | None, step: int, **options: Any) -> None:
        """See :meth:`recipe.fspo.recorder.Recorder.begin_update`."""
        RECORDER.begin_update(band_state, step, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pop_mini_batches(self) -> list[MiniBatch] | None:
        """What this rank recorded of every mini-batch since the last call; None if another one has seen the same.

        Under Ulysses all ranks of a group compute the loss of the same sequences.
        """
        recorded = RECORDER.pop()
        return recorded if self.actor.engine.is_mp_src_rank_with_outputs() else None


class FSPODetachedWorker(FSPOWorker, DetachActorWorker):
    """The worker of ``separate_async``, which keeps copies of the weights: pi_old of a step, and the newest."""
