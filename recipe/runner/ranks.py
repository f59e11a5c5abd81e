"""The ranks of a run, one a GPU: those that train, and those that only generate."""

from __future__ import annotations

from omegaconf import DictConfig


def asynchronous_mode(trainer: DictConfig) -> str | None:
    """The group of ``trainer.v1`` that an asynchronous trainer reads, whatever it is called before that."""
    mode = str(trainer.v1.trainer_mode)
    return next((name for name in ("colocate_async", "separate_async") if mode.endswith(name)), None)


def training(trainer: DictConfig) -> int:
    """Ranks that train."""
    return int(trainer.nnodes * trainer.n_gpus_per_node)


def only_generating(trainer: DictConfig, rollout: DictConfig) -> int:
    """Ranks that generate and do not train; 0 but for ``mode=separate_async``."""
    return int(rollout.nnodes * rollout.n_gpus_per_node) if asynchronous_mode(trainer) == "separate_async" else 0
