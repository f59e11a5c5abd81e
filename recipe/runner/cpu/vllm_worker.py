"""vLLM worker extension for CPUs, chosen by ``rollout.engine_kwargs.vllm.worker_extension_cls``."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from recipe.runner.cpu.patches import keep_vllm_linear_weights


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's colocated worker, able to receive weights on a CPU."""

    def __new__(cls, **kwargs: Any) -> CPUWorkerExtension:
        # Here, because this runs in the worker's process before vLLM builds and loads the model.
        keep_vllm_linear_weights()
        # One core is left to the agent loop: else each small product waits for a thread that is put off its core.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        return super().__new__(cls, **kwargs)

    def reseed(self, seed: int) -> None:
        """Let sampling begin anew from ``seed``."""
        torch.manual_seed(seed)

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        # On a GPU the receiver moves each tensor out of the shared-memory bucket, which a live view keeps open here.
        super()._update_weights([(name, tensor.clone()) for name, tensor in weights], *args, **kwargs)
