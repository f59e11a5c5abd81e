"""Several runs, one after the other, in the processes of one start.

Starting Ray, FSDP and vLLM takes longer than a short run. A comparison (:mod:`recipe.fspo.compare`) starts them once:
when a run ends, the next one begins with the initial weights, a new optimizer, its own loss, data order and seeds, and
its own run folder. Only what :data:`PER_RUN` names may differ between the runs of a series.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from omegaconf import DictConfig, OmegaConf

from fspo.data.io import atomic_path
from recipe.fspo import run_info
from recipe.fspo.compose import compose
from recipe.fspo.preemption import Preempted
from recipe.fspo.preflight import PreflightError
from recipe.fspo.progress import PROGRESS

if TYPE_CHECKING:
    from recipe.fspo.trainer import FSPOTrainer

#: What may differ between the runs of one series; everything else is fixed when the processes start.
PER_RUN = (
    "seed",
    "algorithm",
    "fspo",
    "data.seed",
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.ref.fsdp_config.seed",
    "actor_rollout_ref.actor.fsdp_config.seed",
    "actor_rollout_ref.actor.data_loader_seed",
    "actor_rollout_ref.actor.policy_loss",
    "actor_rollout_ref.actor.optim",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.total_training_steps",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
)
#: The parts of a trainer that are processes, or talk to them.
_PROCESSES = (
    "actor_rollout_wg",
    "ref_policy_wg",
    "ref_in_actor",
    "reward_loop_manager",
    "teacher_model_manager",
    "distillation_config",
    "llm_server_manager",
    "checkpoint_manager",
    "resource_pool_manager",
    "resource_pool_to_cls",
    "role_worker_mapping",
    "mapping",
)


def fixed_part(config: DictConfig) -> dict[str, Any]:
    """What a run's configuration must share with the runs before it in a series."""
    values: dict[str, Any] = OmegaConf.to_container(copy.deepcopy(config), resolve=True)
    for key in PER_RUN:
        *parents, last = key.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node.pop(last, None)
    return values


def plan_later(config: DictConfig, make_ready: Callable[[DictConfig], None]) -> None:
    """Compose the runs whose overrides the files of ``fspo.then`` hold, and put their configurations' paths there.

    Args:
        config: The first run, ready to start; changed in place.
        make_ready: Does for a later run what the launcher does for the first.

    Raises:
        PreflightError: if a later run needs other processes than the first; it names the keys.
    """
    if not config.fspo.then:
        return
    if config.evaluate:
        raise PreflightError(["fspo.then and evaluate=true exclude each other: an evaluation ends with its scores"])
    fixed, paths = fixed_part(config), []
    for name in config.fspo.then:
        later = compose(OmegaConf.to_container(OmegaConf.load(Path(name))))
        make_ready(later)
        if different := _differences(fixed, fixed_part(later)):
            raise PreflightError(
                [
                    f"{name}: {', '.join(different)} differ from the first run of the series, whose processes it "
                    "would use; start it by itself (python -m recipe.fspo.compare starts=separate)"
                ]
            )
        paths.append(str(Path(later.fspo.run_dir) / "config.yaml"))
        with atomic_path(Path(paths[-1])) as temporary:
            temporary.write_text(OmegaConf.to_yaml(later, resolve=True), encoding="utf-8")
    config.fspo.then = paths


def _differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [found for key in keys for found in _differences(a.get(key), b.get(key), f"{prefix}{key}.")]
    return [] if a == b else [prefix.rstrip(".")]


def reseed(trainer: FSPOTrainer) -> None:
    """Let vLLM's sampling begin from the run's seed, whatever was sampled before (a run that came first, a validation).

    Needs a worker extension that can (``recipe.fspo.cpu.vllm_worker``): elsewhere vLLM keeps the seed of its start.
    """
    if trainer.config.trainer.device != "cpu":
        return
    seed = trainer.config.seed * 1_000_003 + trainer.global_steps
    servers = [server for replica in trainer.llm_server_manager.get_replicas() for server in replica.servers]
    ray.get([server.collective_rpc.remote("reseed", args=(seed + i,)) for i, server in enumerate(servers)])


def run_next(done: FSPOTrainer, agent_loop_manager: Any) -> None:
    """Run what the configuration of the run that is done names in ``fspo.then``."""
    later = list(done.config.fspo.then)
    if not later:
        return
    run_info.end(done.config.fspo.run_dir, "finished")
    done.logger.finish(exit_code=0)
    config = OmegaConf.load(Path(later[0]))
    config.fspo.then = later[1:]
    config.transfer_queue.enable = True  # as verl's task runner sets it for the first run
    PROGRESS.say(f"next run: {config.fspo.run_dir}")
    run_info.begin(config)
    status = "failed"
    try:
        trainer = type(done)(config)
        _take_over(trainer, done)
        trainer.fit(agent_loop_manager)
        status = "finished"
    except Preempted:
        status = "preempted"
        raise
    finally:
        if run_info.status(config.fspo.run_dir) == "running":
            run_info.end(config.fspo.run_dir, status)


def _take_over(trainer: FSPOTrainer, done: FSPOTrainer) -> None:
    """What ``trainer.init()`` does, with the processes of the run that is done."""
    for name in _PROCESSES:
        if hasattr(done, name):
            setattr(trainer, name, getattr(done, name))
    trainer._init_tokenizer()
    trainer._init_dataloader()
    trainer._init_dump_executor()
    trainer.checkpoint_manager.sleep_replicas()
    trainer.actor_rollout_wg.begin_again(trainer.config.actor_rollout_ref.actor)
    trainer._load_checkpoint()
    trainer.on_init_end()
