"""verl's hybrid worker, subclassed at its public class attributes: exact sums per mini-batch reach the trainer."""

from __future__ import annotations

import os
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from recipe.fspo.plugin import require_plugin
from recipe.fspo.recorder import RECORDER, SumArrays

if os.environ.get("VERL_PLATFORM") == "cpu":
    import recipe.fspo.cpu.engine  # noqa: F401  (registers the FSDP engine for CPUs)


class RecordingTrainingWorker(TrainingWorker):
    """``TrainingWorker`` that tells the recorder where one mini-batch ends and the next begins."""

    def train_batch(self, data: Any) -> Any:
        RECORDER.begin_mini_batch()
        return super().train_batch(data)


class FSPOWorker(ActorRolloutRefWorker):
    """``ActorRolloutRefWorker`` with the calls that the trainer adds: sums out, band state in, weights' fingerprint."""

    actor_worker_cls = RecordingTrainingWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_plugin()
        super().__init__(*args, **kwargs)
        RECORDER.enable(max_response_length=self.config.rollout.response_length)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pop_sequence_sums(self) -> list[SumArrays]:
        """Sums of this rank's sequences for every mini-batch since the last call."""
        return RECORDER.pop()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_band_state(self, band_state: Any) -> None:
        """Use ``band_state`` (a :class:`fspo.calibration.BandState`) in the updates that follow."""
        RECORDER.band_state = band_state

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def parameter_norm(self) -> float:
        """Euclidean norm of this rank's parameter shards, in float64; changes whenever a weight does."""
        total = 0.0
        for parameter in self.actor.engine.module.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            total += float(local.detach().to(torch.float64).square().sum())
        return total**0.5
