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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Needs:
    """What a run asks of Ray: nodes with so many GPUs each (on CPUs logical ones), and CPUs and GPUs over all nodes."""

    nodes: int
    gpus_per_node: int
    cpus: int
    gpus: int


def needs_of(config: DictConfig) -> Needs:
    """What the configuration will make verl ask for."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    storage_units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    helpers = rollout.agent.num_workers + config.reward.num_workers + storage_units
    training, generating = ranks.training(trainer), ranks.only_generating(trainer, rollout)
    cpus = training * CPUS_PER_RANK + generating * CPUS_PER_ROLLOUT_RANK + helpers + FIXED_CPUS
    return Needs(trainer.nnodes, trainer.n_gpus_per_node, cpus, training + generating)


def missing(needs: Needs, nodes: list[Mapping[str, float]]) -> str | None:
    """What ``nodes`` (the resources of each live node) lack; None if they suffice."""
    gpus, cpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("GPU", "CPU"))
    able = sum(node.get("GPU", 0) >= needs.gpus_per_node for node in nodes)
    if able < needs.nodes or gpus < needs.gpus:
        have = ", ".join(f"{node.get('GPU', 0):g}" for node in nodes) or "none"
        return (
            f"{needs.nodes} node(s) with {needs.gpus_per_node} GPU(s) each (trainer.nnodes, trainer.n_gpus_per_node), "
            f"with those of rollout.nnodes {needs.gpus} GPUs, are needed; the {len(nodes)} node(s) in Ray have: {have}"
        )
    if cpus < needs.cpus:
        return (
            f"{needs.cpus} CPUs are needed, Ray has {cpus:g}: set ray_kwargs.ray_init.num_cpus={needs.cpus} (logical; "
            "more than the machine's cores is fine; under slurm/ it is FSPO_RAY_CPUS)"
        )
    return None


def wait_for_resources(config: DictConfig, say: Callable[[str], None]) -> None:
    """Return once Ray has what the run needs. Raises ExplainedError after two minutes without."""
    needs = needs_of(config)

    def lacking() -> str | None:
        return missing(needs, [node["Resources"] for node in ray.nodes() if node["Alive"]])

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
