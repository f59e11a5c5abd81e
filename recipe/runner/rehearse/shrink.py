"""The job, made small enough for a few CPU cores: every setting that the rehearsal changes, and why.

What is not in the list of changes runs as in the job: the loss and its advantage, types of numbers, batching by tokens,
packing, padding to one shape, gradient checkpointing, offloading, validation, checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.checks import ulysses
from recipe.runner.launch.compose import compose

#: Tokens of a response, at most.
RESPONSE: Final = 64
#: Responses to one prompt, at most; optimizer steps per rollout batch, at most.
GROUP, UPDATES = 4, 8
STEPS: Final = 2

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_REWARD, _VERLS_REWARD = "recipe.runner.rehearse.reward", "default_compute_score"
_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
_EXECUTOR = f"{_ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend"
#: What a CPU needs; the values are those of conf/experiment/demo.yaml, and docs/cpu.md has the reasons.
_OF_A_CPU: Final = {
    "trainer.device": "GPUs to CPU cores: kernels, NCCL and GPU memory",
    _ATTENTION: "flash-attn needs a GPU; sequences stay packed",
    f"{_ACTOR}.use_torch_compile": "compilation",
    f"{_ACTOR}.fsdp_config.use_torch_compile": "compilation",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": "compilation",
    f"{_ROLLOUT}.enforce_eager": "CUDA graphs",
    f"{_ROLLOUT}.free_cache_engine": "vLLM's sleep mode",
    f"{_ROLLOUT}.enable_sleep_mode": "vLLM's sleep mode",
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": "memory",
    f"{_ROLLOUT}.engine_kwargs.vllm.worker_extension_cls": "weights into a CPU's vLLM",
    f"{_ROLLOUT}.agent.num_workers": "processes",
    "reward.num_workers": "processes",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": "processes",
    "data.dataloader_num_workers": "processes",
    "ray_kwargs.ray_init.address": "a Ray of its own",
    "ray_kwargs.ray_init.num_cpus": "a Ray of its own",
    "ray_kwargs.ray_init.include_dashboard": "a Ray of its own",
}
#: Settings that people ask about, printed with their value if they run as they are.
OF_INTEREST: Final = (
    "algorithm.adv_estimator",
    f"{_ACTOR}.policy_loss.loss_mode",
    f"{_ACTOR}.strategy",
    f"{_ACTOR}.fsdp_config.model_dtype",
    f"{_ACTOR}.fsdp_config.mixed_precision",
    f"{_ROLLOUT}.dtype",
    f"{_ACTOR}.use_dynamic_bsz",
    f"{_ACTOR}.pad_to_length",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    f"{_ACTOR}.fsdp_config.param_offload",
    f"{_ACTOR}.fsdp_config.optimizer_offload",
    f"{_ACTOR}.optim.lr",
    f"{_ACTOR}.optim.lr_warmup_steps",
    f"{_ROLLOUT}.tensor_model_parallel_size",
)


@dataclass(frozen=True)
class Change:
    """One setting of the job that the rehearsal's run has another value for.

    Attributes:
        key, old, new: The setting.
        replaced: True if something else runs in its place; False if it is only smaller.
        why: What the change is for, or what is lost by it.
    """

    key: str
    old: Any
    new: Any
    replaced: bool
    why: str

    def override(self) -> str:
        """For Hydra's command line."""
        return f"++{self.key}={json.dumps(self.new)}"


def changes(
    config: DictConfig, folder: Path, model: Path, data: dict[str, list[str]], prompt: int, ranks: int
) -> list[Change]:
    """Every setting of ``config`` that the run on CPUs changes.

    Args:
        config: The job, resolved.
        folder: Of the rehearsal's run.
        model: The small model.
        data: ``data.train_files`` and ``data.val_files``; empty where the run makes its own.
        prompt: Tokens of the longest prompt in them.
        ranks: FSDP ranks.
    """
    found = [*_machine(config, ranks), *_sizes(config, prompt, ranks), *_run(config, folder, model, data)]
    return [change for change in found if change.old != change.new]


def rows(config: DictConfig, ranks: int) -> int:
    """Rows of data that the small run needs."""
    return next(change.new for change in _sizes(config, 1, ranks) if change.key == "data.train_batch_size")


def _value(config: DictConfig, key: str) -> Any:
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _machine(config: DictConfig, ranks: int) -> Iterator[Change]:
    demo = compose(["experiment=demo"])

    def replace(key: str, new: Any, why: str) -> Change:
        return Change(key, _value(config, key), new, True, why)

    for key, why in _OF_A_CPU.items():
        yield replace(key, _value(demo, key), why)
    rollout, trainer, actor = config.actor_rollout_ref.rollout, config.trainer, config.actor_rollout_ref.actor
    gpus = trainer.nnodes * trainer.n_gpus_per_node
    tensor = math.gcd(rollout.tensor_model_parallel_size, ranks)
    if tensor == 1:
        yield replace(_EXECUTOR, _value(demo, _EXECUTOR), "one process fewer")
    yield replace("ray_kwargs.ray_init.num_gpus", ranks, "logical GPUs")
    yield replace("trainer.nnodes", 1, "traffic between nodes")
    yield replace(f"{_ACTOR}.ulysses_sequence_parallel_size", 1, "Ulysses needs flash-attn")
    yield replace(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 1, "Ulysses needs flash-attn")
    yield replace(f"{_ROLLOUT}.data_parallel_size", 1, "vLLM's data parallelism")
    yield replace(f"{_ROLLOUT}.pipeline_model_parallel_size", 1, "vLLM's pipeline")
    yield replace("actor_rollout_ref.model.use_fused_kernels", False, "Triton kernels")
    yield Change("trainer.n_gpus_per_node", trainer.n_gpus_per_node, ranks, False, f"{gpus} ranks")
    yield Change(f"{_ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size, tensor, False, "ranks")
    shards = actor.fsdp_config.fsdp_size
    if 0 < shards < gpus:
        new = max(1, shards * ranks // gpus)
        yield Change(f"{_ACTOR}.fsdp_config.fsdp_size", shards, new, False, "the same share of the ranks")


def _sizes(config: DictConfig, prompt: int, ranks: int) -> Iterator[Change]:
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout

    def shrink(key: str, new: Any, why: str) -> Change:
        return Change(key, _value(config, key), new, False, why)

    prompt, response = min(prompt, data.max_prompt_length), min(RESPONSE, data.max_response_length)
    scale = (prompt + response) / (data.max_prompt_length + data.max_response_length)
    yield shrink("data.max_prompt_length", prompt, "the rows that are used")
    yield shrink("data.max_response_length", response, "time")
    parts = ulysses(config)
    in_ratio = "in the ratio of the lengths"
    for key, factor in (
        (f"{_ACTOR}.ppo_max_token_len_per_gpu", parts),
        (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", parts),
        ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", parts),
        (f"{_ACTOR}.fsdp_config.pad_to_length_bucket", 1),
        (f"{_ROLLOUT}.max_model_len", 1),
        (f"{_ROLLOUT}.max_num_batched_tokens", 1),
    ):
        if isinstance(old := _value(config, key), int):
            new = math.ceil(old * factor * scale)
            yield shrink(key, max(new, rollout.max_num_seqs) if "num_batched" in key else new, in_ratio)
    group = min(rollout.n, GROUP)
    updates = min(UPDATES, data.train_batch_size // actor.ppo_mini_batch_size)
    yield shrink(f"{_ROLLOUT}.n", group, "time")
    yield shrink(f"{_ACTOR}.ppo_mini_batch_size", ranks, "one prompt per rank")
    yield shrink("data.train_batch_size", ranks * updates, f"{updates} updates per rollout batch")
    if not actor.use_dynamic_bsz:
        micro = math.gcd(group, actor.ppo_micro_batch_size_per_gpu or 1)
        for key in (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"):
            yield shrink(key, micro, "the mini-batch")
    yield shrink(f"{_ROLLOUT}.val_kwargs.n", min(rollout.val_kwargs.n, 2), "time")
    yield shrink("trainer.total_training_steps", STEPS, "time")
    yield shrink("trainer.total_epochs", max(STEPS, config.trainer.total_epochs), "one step an epoch")
    for key in ("trainer.save_freq", "trainer.test_freq"):
        yield shrink(key, 1 if key.endswith("save_freq") else STEPS, "so that it happens")


def _run(config: DictConfig, folder: Path, model: Path, data: dict[str, list[str]]) -> Iterator[Change]:
    yield Change("fspo.run_dir", config.fspo.run_dir, str(folder), True, "a folder of its own")
    yield Change("trainer.resume_mode", config.trainer.resume_mode, "auto", True, "the run's own checkpoint")
    yield Change("fspo.restarts", config.fspo.restarts, 0, True, "the rehearsal kills the run itself")
    yield Change("trainer.logger", _value(config, "trainer.logger"), ["console"], True, "nothing leaves the machine")
    yield Change(
        "actor_rollout_ref.model.path",
        config.actor_rollout_ref.model.path,
        str(model),
        False,
        "fewer and narrower layers of the same architecture, random weights",
    )
    for key, files in data.items():
        yield Change(f"data.{key}", _value(config, f"data.{key}"), files, False, "a few rows of each file")
    why = "the job's function scores every response, but a coin decides: random weights never earn a reward"
    key = "reward.custom_reward_function"
    yield Change(f"{key}.path", config.reward.custom_reward_function.path, f"pkg://{_REWARD}", True, why)
    yield Change(f"{key}.name", None, "compute_score", True, why)
    for name, value in reward(config).items():
        if name.startswith("rehearsed_"):
            yield Change(f"{key}.reward_kwargs.{name}", None, value, True, why)


def reward(config: DictConfig) -> dict[str, Any]:
    """The keywords of the rehearsal's reward function: the job's function, and the job's keywords."""
    custom = config.reward.custom_reward_function
    path, name = (custom.path, custom.name) if custom.path else ("pkg://verl.utils.reward_score", _VERLS_REWARD)
    keywords = _value(config, "reward.custom_reward_function.reward_kwargs") or {}
    return {"rehearsed_path": path, "rehearsed_name": name, **keywords}


def as_is(config: DictConfig, changed: Sequence[Change]) -> Iterator[tuple[str, Any]]:
    """Key and value of what people ask about and the run does not change."""
    keys = {change.key for change in changed}
    for key in OF_INTEREST:
        if key not in keys and (value := _value(config, key)) is not None:
            yield key, value
