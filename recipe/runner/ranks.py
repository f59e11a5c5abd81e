"""The ranks of a run, one a GPU: those that train, and those that only generate."""

from __future__ import annotations

from omegaconf import DictConfig


def training(trainer: DictConfig) -> int:
    """Ranks that train."""
    return int(trainer.nnodes * trainer.n_gpus_per_node)


def of_a_copy(trainer: DictConfig, actor: DictConfig) -> int:
    """Ranks over which FSDP spreads one copy of the weights: fsdp_size, or all that train."""
    number, size = training(trainer), int(actor.fsdp_config.fsdp_size)
    return size if 0 < size < number else number


def only_generating(trainer: DictConfig, rollout: DictConfig) -> int:
    """Ranks that generate and do not train; 0 but for ``mode=separate_async``."""
    is_separate = str(trainer.v1.trainer_mode).endswith("separate_async")
    return int(rollout.nnodes * rollout.n_gpus_per_node) if is_separate else 0
