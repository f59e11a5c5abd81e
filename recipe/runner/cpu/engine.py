"""Registers verl's FSDP engine for CPUs (verl 0.9.1 registers it for cuda and npu only).

Importing this module registers it, so that plain verl can name it in ``actor_rollout_ref.model.external_lib``.
"""

from __future__ import annotations

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from recipe.runner.cpu.patches import offload_without_pinned_memory

offload_without_pinned_memory()
EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
