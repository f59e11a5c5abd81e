"""Checks that end a run before Ray starts, each with one sentence that names the key, the value and the remedy.

What a machine has to hold (packages, files), the arithmetic of batches and lengths, the checkpoint to resume. What the
settings of a loss mean together is checked by :mod:`recipe.fspo.config`. Imports neither verl nor ray: the planner
(:mod:`recipe.runner.plan`) uses the arithmetic too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner import SUPPORTED_VERL
from recipe.runner.checkpoints.integrity import resume_problems
from recipe.runner.launch import data_files, loggers, model_folder, reward_function, server_slots
from recipe.runner.launch.model_folder import read_model_config
from recipe.runner.launch.values import PreflightError

#: Names of types of numbers that verl, torch and vLLM understand alike.
DTYPES: Final = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
#: From here on a learning rate is one of another unit; policies of language models are trained with 1e-7 to 1e-4.
_LR_MAX: Final = 1e-2


def _package_problems(config: DictConfig) -> Iterator[str]:
    installed = importlib.metadata.version("verl")
    if installed != SUPPORTED_VERL:
        yield (
            f"verl {installed} is installed, this recipe is written for verl {SUPPORTED_VERL}: "
            f"pip install verl=={SUPPORTED_VERL}"
        )
    for module, remedy in (("vllm", "vLLM"), ("transfer_queue", "TransferQueue>=0.1.10")):
        if importlib.util.find_spec(module) is None:
            yield f"the package {module} is missing ({remedy}): run `make setup`, or install requirements/gpu.txt"


def gpu_package_problems(config: DictConfig) -> Iterator[str]:
    """The packages that only a machine with GPUs can have."""
    implementation = OmegaConf.select(config, "actor_rollout_ref.model.override_config.attn_implementation")
    needs_flash = implementation == "flash_attention_2" or config.actor_rollout_ref.model.use_remove_padding
    if config.trainer.device != "cpu" and needs_flash and importlib.util.find_spec("flash_attn") is None:
        yield (
            "flash-attn is not installed, but this experiment removes padding: install "
            "requirements/gpu-flash-attn.txt, or set "
            "actor_rollout_ref.model.use_remove_padding=false "
            "++actor_rollout_ref.model.override_config.attn_implementation=sdpa"
        )
    backend = OmegaConf.select(config, "actor_rollout_ref.rollout.checkpoint_engine.backend")
    if backend == "nccl" and importlib.util.find_spec("cupy") is None:
        yield (
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl needs the package cupy: install "
            "requirements/gpu.txt"
        )


def _precision_problems(config: DictConfig) -> Iterator[str]:
    keys = ["actor_rollout_ref.rollout.dtype"]
    for engine in ("actor", "ref"):
        fsdp = f"actor_rollout_ref.{engine}.fsdp_config"
        keys += [f"{fsdp}.model_dtype", f"{fsdp}.dtype"]
        keys += [f"{fsdp}.mixed_precision.{each}_dtype" for each in ("param", "reduce", "buffer")]
    for key in keys:
        value = OmegaConf.select(config, key)
        if value is not None and value not in DTYPES:
            yield f"{key}={value} is not a type of numbers: choose one of {', '.join(DTYPES)}"


def _optimizer_problems(config: DictConfig) -> Iterator[str]:
    key, lr = "actor_rollout_ref.actor.optim.lr", config.actor_rollout_ref.actor.optim.lr
    if not isinstance(lr, int | float) or not 0 < lr < _LR_MAX:
        yield f"{key}={lr} must be a number above 0 and below {_LR_MAX:g}: 1e-6 is usual for a language model's policy"


def _validation_problems(config: DictConfig) -> Iterator[str]:
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.n > 1 and not val.do_sample:
        yield (
            f"actor_rollout_ref.rollout.val_kwargs.n={val.n} with do_sample=false draws the same greedy response "
            f"{val.n} times: set val_kwargs.do_sample=true, or n=1"
        )


def _room_problems(config: DictConfig) -> Iterator[str]:
    folder, told = model_folder.find(config.actor_rollout_ref.model.path), read_model_config(config) or {}
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder else 0
    dtype = told.get("dtype") or told.get("torch_dtype")
    return room_problems(config, weights // (4 if dtype == "float32" else 2))


def room_problems(config: DictConfig, parameters: int) -> Iterator[str]:
    """The run folder and the disk below it: can be written to, with room for the checkpoints that are kept.

    A checkpoint has 12 bytes per parameter: weights and two moments in fp32. With LoRA only the adapters have moments.
    """
    root = Path(config.trainer.default_local_dir)
    place = next(path for path in (root, *root.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield f"fspo.run_dir={config.fspo.run_dir}: {place} is not a folder that can be written to; give another one"
        return
    kept = 0 if config.trainer.save_freq <= 0 else config.trainer.max_actor_ckpt_to_keep or 1
    contents = OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.save_contents") or ("optimizer",)
    lora = OmegaConf.select(config, "actor_rollout_ref.model.lora_rank") or 0
    each = 12 if "optimizer" in contents and lora <= 0 else 4
    needed, free = each * parameters * kept, shutil.disk_usage(place).free
    if not any(root.glob("global_step_*")) and free < needed:
        yield (
            f"fspo.run_dir={config.fspo.run_dir}: {free / 2**30:.1f} GiB are free in {place}, and {kept} checkpoint(s) "
            f"need {needed / 2**30:.1f} GiB: make room, or give another folder"
        )


def _shape_problems(config: DictConfig) -> Iterator[str]:
    told = read_model_config(config) or {}
    yield from length_problems(config, told.get("max_position_embeddings"))
    yield from head_problems(config, told.get("num_attention_heads"))


def head_problems(config: DictConfig, heads: object) -> Iterator[str]:
    """Parallel sizes that do not divide the model's heads (``num_attention_heads``; not an integer: unknown)."""
    if not isinstance(heads, int):
        return
    for key, size in (
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            config.actor_rollout_ref.rollout.tensor_model_parallel_size,
        ),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", ulysses(config)),
    ):
        if size < 1 or heads % size:
            smaller = max(d for d in range(1, max(2, size)) if heads % d == 0)
            yield f"{key}={size} does not divide the model's {heads} attention heads: set it to {smaller}"


def _checkpoint_problems(config: DictConfig) -> Iterator[str]:
    if OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.async_save"):
        yield (
            "actor_rollout_ref.actor.checkpoint.async_save=true never writes the file that a resume reads (verl issue "
            "7952), so a restarted run would silently begin again: set it to false"
        )
    keep = config.trainer.max_actor_ckpt_to_keep
    if keep is not None and keep < 2:
        yield (
            f"trainer.max_actor_ckpt_to_keep={keep} deletes the old checkpoint before the new one is registered, and a "
            "crash in between loses both: set it to 2 or more, or to null"
        )


def divides(larger_key: str, larger: int, smaller_key: str, smaller: int) -> Iterator[str]:
    """A sentence if ``larger`` is not a multiple of ``smaller``."""
    if smaller <= 0 or larger % smaller:
        yield f"{larger_key}={larger} is not a multiple of {smaller_key}={smaller}: change one of them so that it is"


def ulysses(config: DictConfig) -> int:
    """The ranks over which a sequence is spread."""
    # The actor's key is the older of the two; verl copies it into the other.
    actor = config.actor_rollout_ref.actor
    return int(max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size))


def batch_problems(config: DictConfig) -> Iterator[str]:
    """Batches into mini-batches, mini-batches over ranks, ranks into vLLM's replicas."""
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    ranks = trainer.n_gpus_per_node * trainer.nnodes
    mini, n = actor.ppo_mini_batch_size, rollout.n
    yield from divides("data.train_batch_size", config.data.train_batch_size, "actor.ppo_mini_batch_size", mini)
    sequences = mini * n
    name, shards = "trainer.nnodes * trainer.n_gpus_per_node", actor.fsdp_config.fsdp_size
    yield from divides("actor.ppo_mini_batch_size * rollout.n", sequences, name, ranks)
    yield from divides(name, ranks, "ulysses_sequence_parallel_size", ulysses(config))
    if 0 < shards < ranks:
        yield from divides(name, ranks, "actor.fsdp_config.fsdp_size", shards)
    micro = actor.ppo_micro_batch_size_per_gpu
    if not actor.use_dynamic_bsz and sequences % ranks == 0:
        if micro is None:
            yield (
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is not set: give the sequences of one forward "
                "pass, or set actor_rollout_ref.actor.use_dynamic_bsz=true"
            )
        else:
            per_rank = "actor.ppo_mini_batch_size * rollout.n / ranks"
            yield from divides(per_rank, sequences // ranks, "actor.ppo_micro_batch_size_per_gpu", micro)
    per_replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    if str(trainer.v1.trainer_mode).endswith("separate_async"):  # vLLM has ranks of its own
        name, ranks = "rollout.nnodes * rollout.n_gpus_per_node", rollout.nnodes * rollout.n_gpus_per_node
    yield from divides(name, ranks, "rollout's parallel sizes", per_replica)


def length_problems(config: DictConfig, max_positions: object) -> Iterator[str]:
    """The longest sequence against the model's positions, vLLM's limit and the token budget of a micro-batch.

    Args:
        config: The composed configuration.
        max_positions: The model's ``max_position_embeddings``; anything but an integer: unknown.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    wanted = config.data.max_prompt_length + config.data.max_response_length
    asked = f"data.max_prompt_length + data.max_response_length = {wanted}"
    limits = (
        ("the model's max_position_embeddings", max_positions, "shorten data.max_response_length"),
        ("actor_rollout_ref.rollout.max_model_len", rollout.max_model_len, f"set it to {wanted}"),
    )
    for name, limit, remedy in limits:
        if isinstance(limit, int) and wanted > limit:
            yield f"{asked} exceeds {name} = {limit}: {remedy}"
    if not actor.use_dynamic_bsz:
        return
    # verl does not split a sequence: it stops with an error at the first one that exceeds the budget, maybe days later.
    parts = ulysses(config)
    for key, budget in (
        ("actor.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        ("rollout.log_prob_max_token_len_per_gpu", rollout.log_prob_max_token_len_per_gpu),
    ):
        if budget * parts < wanted:
            yield (
                f"actor_rollout_ref.{key}={budget} is less than the longest sequence ({asked}"
                + (f", over {parts} Ulysses ranks): " if parts > 1 else "): ")
                + f"set it to {-(-wanted // parts)} or more"
            )


_CHECKS: tuple[Callable[[DictConfig], Iterator[str]], ...] = (
    _package_problems,
    gpu_package_problems,
    model_folder.problems,
    _precision_problems,
    _optimizer_problems,
    _validation_problems,
    loggers.problems,
    _room_problems,
    data_files.problems,
    reward_function.problems,
    batch_problems,
    server_slots.problems,
    _shape_problems,
    _checkpoint_problems,
    resume_problems,
)


def check(config: DictConfig, further: Callable[[DictConfig], Iterator[str]], elsewhere: bool = False) -> None:
    """Run every check on a resolved configuration, and the ``further`` ones of the command.

    Args:
        config: Prepared.
        further: Checks of the command.
        elsewhere: The run will be on another machine: with the packages for its GPUs, and another disk.

    Raises:
        PreflightError: listing all problems found, not only the first.
    """
    of_the_machine = (gpu_package_problems, _room_problems) if elsewhere else ()
    finds = [find for find in (*_CHECKS, further) if find not in of_the_machine]
    problems = [problem for find in finds for problem in find(config)]
    if problems:
        raise PreflightError(*problems)
