"""verl's hybrid worker, subclassed at its public class attributes.

The rows of each mini-batch reach the trainer, an update that is not finite ends the run, and old and new
log-probabilities come from the same packs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import recipe.fspo.sqrt_rejection
from recipe.fspo.recorder import RECORDER, MiniBatch, rows_of
from recipe.runner.faults.nonfinite import guarded_update
from recipe.runner.verl_patches.packs import SamePacksWorker
from recipe.runner.verl_patches.weight_copies import CopyingWorker

from fspo.losses import UnusableRowsError
from fspo.types import BandState
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    import recipe.runner.cpu.attention
    import recipe.runner.cpu.engine  # noqa: F401  (both register what they are named for)
    from recipe.runner.cpu.patches import log_probs_of_many_tokens_at_once

    log_probs_of_many_tokens_at_once()

#: How many steps in a row a gradient scaler may skip: it halves its scale of 65,536 each time.
_SKIPPED_STEPS = 20


def recorded(loss_fn: Callable[..., Any], model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """``loss_fn`` of an actor, and a row for each response of the micro-batch, whatever its policy loss."""
    result = loss_fn(model_output=model_output, data=data, dp_group=dp_group)
    config = loss_fn.keywords["config"]  # type: ignore[attr-defined]
    RECORDER.parts.append(rows_of(model_output["log_probs"].detach(), data, config))
    return result


class GuardedWorker(SamePacksWorker):
    """``SamePacksWorker`` that ends the run at a mini-batch without a finite update."""

    #: Where a bad mini-batch is saved.
    folder: Path
    _skipped = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Moments and position in the schedule are the checkpoint's; learning rate, weight decay and schedule are the
        configuration's. Loading alone would bring back the settings of the optimizer that was saved.
        """
        optimizer, schedule = self.engine.optimizer, self.engine.lr_scheduler
        own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        base_lrs = schedule.base_lrs
        super().load_checkpoint(*args, **kwargs)
        schedule.base_lrs = base_lrs
        factors = [of_step(schedule.last_epoch) for of_step in schedule.lr_lambdas]
        for group, settings, base_lr, factor in zip(optimizer.param_groups, own, base_lrs, factors, strict=True):
            group |= settings | {"lr": base_lr * factor}

    def train_batch(self, data: Any) -> Any:
        # With fp16, verl's gradient scaler leaves out steps that overflow until it has found its scale.
        may_skip = _SKIPPED_STEPS if getattr(self.engine, "scaler", None) is not None else 0
        with guarded_update(data, self.folder, self.rank, UnusableRowsError, self._skipped < may_skip) as metrics:
            output = super().train_batch(data)
            if output is not None:
                metrics |= tu.get(output, "metrics")
        grad_norm = metrics.get("grad_norm")
        self._skipped = 0 if grad_norm is None or math.isfinite(grad_norm) else self._skipped + 1
        return output


class RecordingTrainingWorker(GuardedWorker):
    """Records each mini-batch once its update has passed the guard."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        super().set_loss_fn(partial(recorded, loss_fn))
        self.mini_batches: list[MiniBatch] = []

    def train_batch(self, data: Any) -> Any:
        RECORDER.begin_mini_batch(self.engine.optimizer)
        output = super().train_batch(data)
        metrics = {} if output is None else tu.get(output, "metrics")
        self.mini_batches.append(RECORDER.end_mini_batch(metrics.get("grad_norm")))
        return output


class FSPOWorker(ActorRolloutRefWorker):
    """``ActorRolloutRefWorker`` with the calls that the trainer adds: rows out, band state in."""

    # upstream: verl.workers.engine_workers:ActorRolloutRefWorker.actor_worker_cls
    actor_worker_cls = RecordingTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_run(self, folder: str) -> None:
        """Keep in this folder what a worker itself has to write."""
        self.actor.folder = Path(folder)
        # NCCL ends a rank that waits in a collective for half an hour, and writes what each rank has entered before.
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(folder) / "collectives_rank")  # and the number of the rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_update(self, band_state: BandState | None, step: int, loss_scale: float = 1.0) -> None:
        """See :meth:`recipe.fspo.recorder.Recorder.begin_update`."""
        RECORDER.begin_update(band_state, step, loss_scale)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pop_mini_batches(self) -> list[MiniBatch] | None:
        """What this rank recorded of every mini-batch since the last call; None if another one has seen the same.

        Under Ulysses all ranks of a group compute the loss of the same sequences.
        """
        mini_batches, self.actor.mini_batches = self.actor.mini_batches, []
        return mini_batches if self.actor.engine.is_mp_src_rank_with_outputs() else None


class FSPODetachedWorker(FSPOWorker, CopyingWorker):
    """The worker of ``separate_async``, which keeps copies of the weights: pi_old of a step, and the newest."""
