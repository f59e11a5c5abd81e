"""FSPO's workers in a run: equal packs, a check of each update, and on CPUs what verl lacks there."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from recipe.fspo.worker import FSPOWorker, RecordingTrainingWorker
from recipe.runner.faults.nonfinite import guarded_update
from recipe.runner.verl_patches.packs import SamePacksWorker
from recipe.runner.verl_patches.weight_copies import CopyingWorker

from fspo.losses import UnusableRowsError
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    import recipe.runner.cpu.attention
    import recipe.runner.cpu.engine  # noqa: F401  (both register what they are named for)
    from recipe.runner.cpu.patches import log_probs_of_many_tokens_at_once

    log_probs_of_many_tokens_at_once()

#: How many steps in a row a gradient scaler may skip: it halves its scale of 65,536 each time.
_SKIPPED_STEPS = 20


class GuardedWorker(SamePacksWorker):
    """``SamePacksWorker`` that ends the run at a mini-batch without a finite update."""

    #: Where a bad mini-batch is saved.
    run_dir: Path | None = None
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
        with guarded_update(data, self.run_dir, self.rank, UnusableRowsError, self._skipped < may_skip) as metrics:
            output = super().train_batch(data)
            if output is not None:
                metrics |= tu.get(output, "metrics")
        grad_norm = metrics.get("grad_norm")
        self._skipped = 0 if grad_norm is None or math.isfinite(grad_norm) else self._skipped + 1
        return output


class RunTrainingWorker(RecordingTrainingWorker, GuardedWorker):
    """Records each mini-batch once its update has passed the guard."""


class RunWorker(FSPOWorker):
    """``FSPOWorker`` with a run folder."""

    actor_worker_cls = RunTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_run(self, run_dir: str) -> None:
        """Keep in this folder what a worker itself has to write."""
        self.actor.run_dir = Path(run_dir)
        # NCCL ends a rank that waits in a collective for half an hour, and writes what each rank has entered before.
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(run_dir) / "collectives_rank")  # and the number of the rank


class RunDetachedWorker(RunWorker, CopyingWorker):
    """``RunWorker`` of ``mode=separate_async``, whose copies of the weights are copies."""
