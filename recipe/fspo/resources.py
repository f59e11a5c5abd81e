"""Waits, for a bounded time, until Ray has what verl will ask for, and says what is missing if it never comes.

verl asks Ray for placement groups and actors without a time limit: a run that asks for one CPU too many would print
nothing and wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
from omegaconf import DictConfig

#: CPUs that verl reserves with each FSDP rank (``ResourcePoolManager.max_colocate_count``).
_CPUS_PER_RANK = 3
#: The task runner, TransferQueue's controller and the load balancer in front of the rollout servers.
_FIXED_CPUS = 3


class MissingResourcesError(RuntimeError):
    """Ray does not have the nodes, GPUs or CPUs that the run needs."""


@dataclass(frozen=True)
class Needs:
    """What a run asks of Ray.

    Attributes:
        nodes: Nodes with ``gpus_per_node`` GPUs each.
        gpus_per_node: GPUs per node; on CPUs these are logical, one per FSDP rank.
        cpus: CPUs over all nodes; logical, as Ray counts them.
    """

    nodes: int
    gpus_per_node: int
    cpus: int


def needs_of(config: DictConfig) -> Needs:
    """What the configuration will make verl ask for."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    storage_units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    helpers = rollout.agent.num_workers + config.reward.num_workers + storage_units
    return Needs(trainer.nnodes, trainer.n_gpus_per_node, ranks * _CPUS_PER_RANK + helpers + _FIXED_CPUS)


def missing(needs: Needs, nodes: list[Mapping[str, float]]) -> str | None:
    """A sentence on what ``nodes`` (the resources of each live node) lack; None if they suffice."""
    capable = [node for node in nodes if node.get("GPU", 0) >= needs.gpus_per_node]
    if len(capable) < needs.nodes:
        found = ", ".join(f"{node.get('GPU', 0):g}" for node in nodes) or "none"
        return (
            f"{needs.nodes} node(s) with {needs.gpus_per_node} GPU(s) each are needed (trainer.nnodes, "
            f"trainer.n_gpus_per_node), but the {len(nodes)} node(s) in Ray have: {found}"
        )
    cpus = sum(node.get("CPU", 0) for node in nodes)
    if cpus < needs.cpus:
        return (
            f"{needs.cpus} CPUs are needed, Ray has {cpus:g}: set ray_kwargs.ray_init.num_cpus={needs.cpus} (Ray "
            "counts logical CPUs; more than the machine's cores is fine; under slurm/ it is FSPO_RAY_CPUS), or reduce "
            "actor_rollout_ref.rollout.agent.num_workers or reward.num_workers"
        )
    return None


def _live_nodes() -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def wait_for_resources(config: DictConfig, say: Callable[[str], None]) -> None:
    """Return once Ray has what the run needs.

    Args:
        config: The run's configuration; ``fspo.wait_for_resources_s`` bounds the wait.
        say: Called with what is being waited for, at most every ten seconds.

    Raises:
        MissingResourcesError: when the time is over.
    """
    needs = needs_of(config)
    limit = config.fspo.wait_for_resources_s
    started = time.monotonic()
    next_word = 0.0
    while (lacking := missing(needs, _live_nodes())) is not None:
        waited = time.monotonic() - started
        if waited >= limit:
            raise MissingResourcesError(f"gave up after {waited:.0f} s (fspo.wait_for_resources_s): {lacking}")
        if waited >= next_word:
            say(f"waiting for Ray, {waited:.0f} of at most {limit:.0f} s: {lacking}")
            next_word = waited + 10
        time.sleep(min(1.0, limit))
