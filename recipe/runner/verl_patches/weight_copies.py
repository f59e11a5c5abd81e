"""Copies of the weights in ``mode=separate_async``: pi_old of a cycle, and the newest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.utils.device import get_torch_device


class CopyingWorker(DetachActorWorker):
    """verl's worker, whose copies are copies, and are written once verl's offloading has ended.

    verl 0.9.1 saves a shard as ``.detach().cpu()``, which copies nothing where the weights are on the host: on CPUs,
    and on GPUs with ``param_offload`` or ``offload_policy``. pi_old would move with every update, S would be 0 in every
    mini-batch, and of the updates of a cycle only the last one would be left. There is no setting.
    """

    @property
    def copy_handler(self) -> Callable[[torch.nn.Module], Any]:
        """verl's own, with a copy of what lies on the host."""
        # upstream: verl.utils.fsdp_utils "local_cpu_tensor = local_gpu_tensor.detach().cpu()"
        save = super().copy_handler

        def copy(module: torch.nn.Module) -> Any:
            get_torch_device().synchronize()  # verl's offloading does not wait for its copies
            state, spec = save(module)
            if next(module.parameters()).device.type == "cpu":
                state = {name: (shard.clone(), settings) for name, (shard, settings) in state.items()}
            return state, spec

        return copy if self.config.actor.strategy == "fsdp2" else save

    @property
    def restore_handler(self) -> Callable[..., Any]:
        """verl's own, once its offloading has ended: it writes to the same memory."""
        restore = super().restore_handler

        def put_back(*args: Any) -> Any:
            get_torch_device().synchronize()
            return restore(*args)

        return put_back
