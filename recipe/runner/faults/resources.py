"""Waits, for a bounded time, for Ray's nodes, GPUs and CPUs: verl would wait for ever, and print nothing.

``python -m recipe.runner.faults.resources SECONDS NODE...`` waits for nodes (``slurm/launch.sh``): the names are those
given to ``ray start --node-name``; the head writes its address to the file ``ray_address`` in FSPO_LOG_DIR.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import ray
from omegaconf import DictConfig

from recipe.runner import ranks
from recipe.runner.faults.errors import ExplainedError

#: CPUs that verl reserves with each FSDP rank (``ResourcePoolManager.max_colocate_count``).
CPUS_PER_RANK = 3  # upstream: verl.single_controller.ray.base "max_colocate_count=3"
#: CPUs that verl reserves with each rank that only generates (``RolloutReplica.init_standalone``).
CPUS_PER_ROLLOUT_RANK = 2  # upstream: verl.workers.rollout.replica "max_colocate_count=2"
#: The task runner, TransferQueue's controller and the load balancer in front of the rollout servers.
FIXED_CPUS = 3
#: Seconds that a run waits for Ray's nodes, GPUs and CPUs.
WAIT_S = 120.0


def wait_while(lacking: Callable[[], str | None], limit_s: float, say: Callable[[str], None]) -> str | None:
    """Ask once a second, and ``say`` every ten, what is missing, until nothing is or the time is over."""
    started = next_word = time.monotonic()
    while (what := lacking()) is not None:
        now = time.monotonic()
        if now - started >= limit_s:
            return what
        if now >= next_word:
            say(f"{now - started:.0f} of at most {limit_s:.0f} s: {what}")
            next_word = now + 10
        time.sleep(1.0)
    return None


def missing(config: DictConfig, nodes: list[Mapping[str, float]]) -> str | None:
    """What ``nodes`` (the resources of each live node) lack of what verl will ask for; None if they suffice.

    A rank is a GPU, on CPUs a logical one.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    training, generating = ranks.training(trainer), ranks.only_generating(trainer, rollout)
    have = [node.get("GPU", 0) for node in nodes]
    if sum(gpus >= trainer.n_gpus_per_node for gpus in have) < trainer.nnodes or sum(have) < training + generating:
        return (
            f"{trainer.nnodes} node(s) with {trainer.n_gpus_per_node} GPU(s) each (trainer.nnodes, "
            f"trainer.n_gpus_per_node), with those of rollout.nnodes {training + generating} GPUs, are needed; the "
            f"{len(nodes)} node(s) in Ray have: {', '.join(f'{gpus:g}' for gpus in have) or 'none'}"
        )
    storage_units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    helpers = rollout.agent.num_workers + config.reward.num_workers + storage_units
    needed = training * CPUS_PER_RANK + generating * CPUS_PER_ROLLOUT_RANK + helpers + FIXED_CPUS
    if (cpus := sum(node.get("CPU", 0) for node in nodes)) < needed:
        return (
            f"{needed} CPUs are needed, Ray has {cpus:g}: set ray_kwargs.ray_init.num_cpus={needed} (logical; more "
            "than the machine's cores is fine; under slurm/ it is FSPO_RAY_CPUS)"
        )
    return None


def wait_for_resources(config: DictConfig, say: Callable[[str], None]) -> None:
    """Return once Ray has what the run needs. Raises ExplainedError after two minutes without."""

    def lacking() -> str | None:
        return missing(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])

    if (what := wait_while(lacking, WAIT_S, lambda text: say(f"waiting for Ray, {text}"))) is not None:
        raise ExplainedError(f"gave up after {WAIT_S:.0f} s: {what}")


def main() -> int:
    """Exit status: 0, or 1 if a node has not joined in time."""
    limit_s, names = float(sys.argv[1]), sys.argv[2:]
    file = Path(os.environ["FSPO_LOG_DIR"], "ray_address")

    def lacking() -> str | None:
        alive: list[str] = []
        with contextlib.suppress(ConnectionError, FileNotFoundError):  # Ray's head is not up yet
            if not ray.is_initialized():
                address = file.read_text(encoding="utf-8").strip()
                ray.init(address=address, log_to_driver=False, logging_level="warning")
            alive = [node["NodeName"] for node in ray.nodes() if node["Alive"]]
        return ", ".join(name for name in names if name not in alive) or None

    if (absent := wait_while(lacking, limit_s, lambda text: print(f"waiting, {text}", flush=True))) is None:
        return 0
    print(f"{absent} did not join Ray within {limit_s:.0f} s (FSPO_READY_TIMEOUT)", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
