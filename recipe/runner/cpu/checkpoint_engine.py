"""Weights from the training ranks to vLLM's through a file in shared memory: verl's own engines need CUDA or RDMA."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from fspo.files import atomic_path


@CheckpointEngineRegistry.register("shared_memory")
class SharedMemoryCheckpointEngine(CheckpointEngine):
    """The first training rank writes one file per transfer, every rollout rank reads it, and the rank removes it."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master
        self._file: Path | None = None

    def prepare(self) -> str | None:
        if not self._is_master:
            return None
        return str(Path(tempfile.mkdtemp(prefix="weights-", dir="/dev/shm"), "weights.safetensors"))

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {"path": [metadata[0]] * actor_wg_world_size}, {"path": [metadata[0]] * rollout_world_size}

    def init_process_group(self, path: str) -> None:
        self._file = Path(path)

    def finalize(self) -> None:
        if self._is_master and self._file is not None:
            shutil.rmtree(self._file.parent, ignore_errors=True)
        self._file = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        # Every rank goes through the weights: gathering one is a collective. Copies, as a file holds no tensor twice.
        tensors = {name: weight.detach().clone() for name, weight in weights}
        if self._is_master:
            with atomic_path(self._file) as temporary:
                save_file(tensors, temporary)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        # Without a time limit: a training rank that dies ends the run, and this process with it.
        while not self._file.exists():
            await asyncio.sleep(0.01)
        with safe_open(self._file, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dictionary)
                yield name, file.get_tensor(name)
