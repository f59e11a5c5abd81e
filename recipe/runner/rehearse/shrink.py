"""The job, made small enough for a few CPU cores: every setting that the rehearsal changes.

What is not among them runs as in the job: the loss and its advantage, types of numbers, batching by tokens, packing,
gradient checkpointing, offloading, validation, checkpoints.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.faults.resources import rollout_only_ranks
from recipe.runner.launch.checks import ulysses

#: Steps of the small run, and its FSDP ranks, where the job has as many; as many that only generate.
STEPS, RANKS = 2, 2
#: Tokens of a response, responses to one prompt, updates of one rollout batch, at most.
RESPONSE, GROUP, UPDATES = 64, 4, 8

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_REWARD: Final = "reward.custom_reward_function"
#: What a CPU needs; docs/index.md has the reasons.
OF_A_CPU: Final = {
    "trainer.device": "cpu",
    "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.use_fused_kernels": False,
    "actor_rollout_ref.model.use_liger": False,
    f"{_ACTOR}.use_torch_compile": False,
    f"{_ACTOR}.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
    f"{_ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 1,
    f"{_ROLLOUT}.data_parallel_size": 1,
    f"{_ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{_ROLLOUT}.enforce_eager": True,
    f"{_ROLLOUT}.free_cache_engine": False,
    f"{_ROLLOUT}.enable_sleep_mode": False,
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 64,
    f"{_ROLLOUT}.checkpoint_engine.backend": "shared_memory",
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": "recipe.runner.cpu.checkpoint_engine",
    f"{_ROLLOUT}.engine_kwargs.vllm.worker_extension_cls": "recipe.runner.cpu.vllm_worker.CPUWorkerExtension",
    f"{_ROLLOUT}.agent.num_workers": 1,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "data.dataloader_num_workers": 0,
    "ray_kwargs.ray_init.address": "local",
    "ray_kwargs.ray_init.num_cpus": 32,
    "ray_kwargs.ray_init.num_gpus": None,
    "ray_kwargs.ray_init.include_dashboard": False,
}


def value_of(config: DictConfig, key: str) -> Any:
    """A setting as plain values; None where it is not set."""
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def small_settings(config: DictConfig, ranks: int, prompt: int, folder: Path) -> dict[str, Any]:
    """The settings of the small job on ``ranks`` FSDP ranks that the prepared job may have otherwise, by key.

    Token budget, padding and vLLM's lengths shrink with the longest sequence; its prompt has ``prompt`` tokens.
    """
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompt, response = min(prompt, data.max_prompt_length), min(RESPONSE, data.max_response_length)
    generating = min(RANKS, rollout_only_ranks(config))
    group, tensor_parallel = min(rollout.n, GROUP), math.gcd(rollout.tensor_model_parallel_size, generating or ranks)
    custom = config.reward.custom_reward_function
    path, name = (
        (custom.path, custom.name) if custom.path else ("pkg://verl.utils.reward_score", "default_compute_score")
    )
    settings = OF_A_CPU | {
        "run.dir": str(folder),
        "run.restarts": 0,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": ranks,
        "trainer.resume_mode": "auto",
        "trainer.logger": ["console"],
        "trainer.total_training_steps": STEPS,
        "trainer.total_epochs": max(STEPS, config.trainer.total_epochs),
        "trainer.save_freq": STEPS,
        "trainer.test_freq": STEPS,
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
        "data.train_batch_size": ranks * min(UPDATES, data.train_batch_size // actor.ppo_mini_batch_size),
        f"{_ACTOR}.ppo_mini_batch_size": ranks,
        f"{_ROLLOUT}.n": group,
        f"{_ROLLOUT}.val_kwargs.n": min(rollout.val_kwargs.n, 2),
        f"{_ROLLOUT}.tensor_model_parallel_size": tensor_parallel,
        f"{_REWARD}.path": "pkg://recipe.runner.rehearse.reward",
        f"{_REWARD}.name": "compute_score",
        f"{_REWARD}.reward_kwargs.rehearsed_path": path,
        f"{_REWARD}.reward_kwargs.rehearsed_name": name,
    }
    if tensor_parallel == 1:  # one process fewer
        executor = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        settings[f"{_ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend"] = executor
    if generating:
        settings |= {f"{_ROLLOUT}.nnodes": 1, f"{_ROLLOUT}.n_gpus_per_node": generating}
    gpus, shards = config.trainer.nnodes * config.trainer.n_gpus_per_node, actor.fsdp_config.fsdp_size
    if 0 < shards < gpus:
        settings[f"{_ACTOR}.fsdp_config.fsdp_size"] = max(1, shards * ranks // gpus)
    if not actor.use_dynamic_bsz:
        micro = math.gcd(group, actor.ppo_micro_batch_size_per_gpu or 1)
        settings[f"{_ACTOR}.ppo_micro_batch_size_per_gpu"] = micro
        settings[f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"] = micro
    scale, parts = (prompt + response) / (data.max_prompt_length + data.max_response_length), ulysses(config)
    for key, factor, least in (
        (f"{_ACTOR}.ppo_max_token_len_per_gpu", parts, 1),
        (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", parts, 1),
        ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", parts, 1),
        (f"{_ACTOR}.fsdp_config.pad_to_length_bucket", 1, 1),
        (f"{_ROLLOUT}.max_model_len", 1, 1),
        (f"{_ROLLOUT}.max_num_batched_tokens", 1, rollout.max_num_seqs),
    ):
        if isinstance(old := value_of(config, key), int):
            settings[key] = max(math.ceil(old * factor * scale), least)
    return settings
