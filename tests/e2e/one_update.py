"""A program: the FSDP workers of this recipe, without a rollout engine, do one update on a recorded batch.

``one_update.py RANKS NODES BATCH OUT FOLDER``: RANKS FSDP ranks on NODES Ray nodes of this machine. The batch is
made and recorded in the file BATCH if that does not exist. Loss, gradients, change of the weights and responses go to
OUT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from columns import in_order

from recipe.fspo.main import composed as compose
from recipe.runner.launch.machine import export_platform

RANKS, NODES, BATCH, OUT, FOLDER = int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:6])
CONFIG = compose(
    [
        "experiment=demo",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "data.offline_task.n_train=64",
        "data.offline_task.n_test=8",
        f"trainer.nnodes={NODES}",
        f"trainer.n_gpus_per_node={RANKS // NODES}",
        f"trainer.default_local_dir={FOLDER}",
    ]
)
export_platform(CONFIG.trainer)  # before verl is imported

import ray  # noqa: E402
import torch  # noqa: E402
from composing import here  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.utils.padding import response_from_nested  # noqa: E402

from recipe.fspo.recorder import join_ranks  # noqa: E402
from recipe.fspo.worker import FSPOWorker, RecordingTrainingWorker  # noqa: E402

SEQUENCES, MINI_BATCHES, PROMPT, LONGEST = 32, 2, 8, 48
TEMPERATURE = 1.0


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().to(torch.float64).flatten()


class KeepingWorker(RecordingTrainingWorker):
    """Keeps the whole gradient of each mini-batch, before it is clipped."""

    def reset(self) -> None:
        super().reset()
        self.gradients: list[np.ndarray] = []
        step = self.engine.optimizer_step

        def keep_and_step() -> Any:
            parameters = [parameter for parameter in self.engine.module.parameters() if parameter.grad is not None]
            self.gradients.append(torch.cat([full(parameter.grad) for parameter in parameters]).numpy())
            return step()

        self.engine.optimizer_step = keep_and_step


class KeptWorker(FSPOWorker):
    """Asked for its gradients and weights."""

    actor_worker_cls = KeepingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept(self) -> tuple[list[np.ndarray], np.ndarray]:
        weights = torch.cat([full(parameter) for parameter in self.actor.engine.module.parameters()])
        return self.actor.gradients, weights.numpy()


def start_ray(config: DictConfig) -> None:
    """One raylet per node, all on this machine."""
    options = {"num_cpus": 16, "num_gpus": RANKS // NODES, "object_store_memory": 200_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    for _ in range(NODES - 1):
        cluster.add_node(**options)
    cluster.wait_for_nodes()
    environment = OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars)
    ray.init(address=cluster.address, runtime_env={"env_vars": environment}, log_to_driver=False)


def start_workers(config: DictConfig) -> Any:
    """As verl's trainer does, for the actor's role alone."""
    manager = ResourcePoolManager({"global_pool": [RANKS // NODES] * NODES}, {"actor": "global_pool"})
    manager.create_resource_pool()
    init = RayClassWithInitArgs(ray.remote(KeptWorker), config=config.actor_rollout_ref, role="actor")
    colocated = create_colocated_worker_cls(class_dict={"actor": init})
    group = RayWorkerGroup(manager.get_resource_pool("actor"), colocated, device_name=config.trainer.device)
    workers = group.spawn(prefix_set=["actor"])["actor"]
    workers.init_model()
    return workers


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def split(values: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(values.split(lengths))


def sequences(generator: torch.Generator) -> TensorDict:
    """Prompts and responses of different lengths, of tokens at random, in verl's form without padding."""
    lengths = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=generator).tolist()
    prompts = [torch.randint(4, 16, (PROMPT,), generator=generator) for _ in lengths]
    responses = [torch.randint(4, 16, (length,), generator=generator) for length in lengths]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    mask = nested([torch.ones(length, dtype=torch.int64) for length in lengths])
    return TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(row)) for row in whole]),
            "response_mask": mask,
            "loss_mask": mask,
        },
        batch_size=SEQUENCES,
    )


def record(workers: Any) -> dict[str, list[torch.Tensor]]:
    """Make the batch: the policy's own log-probabilities, moved a little, so that ratios mean something."""
    generator = torch.Generator().manual_seed(0)
    data = sequences(generator)
    question = data.clone()
    tu.assign_non_tensor(question, calculate_entropy=False, compute_loss=False, temperature=TEMPERATURE)
    log_probs = response_from_nested(workers.compute_log_prob(question)["log_probs"], data["response_mask"])
    lengths = data["responses"].offsets().diff().tolist()
    rows = {name: list(data[name].unbind()) for name in sorted(data.keys())}
    noise = 0.02 * torch.randn(sum(lengths), generator=generator)
    rows["old_log_probs"] = split(log_probs.values() + noise, lengths)
    rows["ref_log_prob"] = split(log_probs.values() + 2 * noise.flip(0), lengths)
    advantage = torch.randn(SEQUENCES, generator=generator)
    rows["advantages"] = [value.expand(length) for value, length in zip(advantage, lengths, strict=True)]
    torch.save({name: [row.clone() for row in values] for name, values in rows.items()}, BATCH)
    return rows


def in_order_of_ranks(rows: dict[str, list[torch.Tensor]]) -> TensorDict:
    """Each rank gets a contiguous part and walks through it: so ordered that every mini-batch has the same members."""
    index = np.arange(SEQUENCES).reshape(MINI_BATCHES, RANKS, -1).transpose(1, 0, 2).reshape(-1)
    return TensorDict({name: nested([values[i] for i in index]) for name, values in rows.items()}, SEQUENCES)


def asked(rows: dict[str, list[torch.Tensor]]) -> TensorDict:
    """The batch with what verl's trainer says of an update."""
    data = in_order_of_ranks(rows)
    size = SEQUENCES // MINI_BATCHES
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=size,
        mini_batch_size=size,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        temperature=TEMPERATURE,
    )
    return data


def main() -> None:
    config = here(CONFIG)
    start_ray(config)
    workers = start_workers(config)
    workers.begin_run(str(FOLDER))
    rows = torch.load(BATCH) if BATCH.exists() else record(workers)
    _, before = workers.kept()[0]
    metrics = workers.update_actor(asked(rows))["metrics"]
    gradients, after = workers.kept()[0]
    placed = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    np.savez(
        OUT,
        nodes=len(placed),
        ranks=workers.world_size,
        used=len({ray.get(worker.__ray_call__.remote(where)) for worker in workers.workers}),
        gradients=np.stack(gradients),
        change=after - before,
        responses=np.stack([in_order(one.rows) for one in join_ranks(workers.pop_mini_batches())]),
        **{
            name: np.array(metrics[name], dtype=np.float64)
            for name in ("loss", "grad_norm", "actor/pg_loss", "kl_loss")
        },
    )
    ray.shutdown()


def where(_: Any) -> str:
    return ray.get_runtime_context().get_node_id()


if __name__ == "__main__":
    main()
    os._exit(0)  # Cluster's own clean-up at exit waits for processes that are gone
