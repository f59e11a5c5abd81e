"""The rules before Ray starts: each mistake costs hours on GPUs, or gives wrong numbers in silence.

:data:`RULES` is the table. A rule is a function that yields one sentence a problem, with the key, the value and what to
give instead. What verl itself refuses within its first minutes has no rule.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from omegaconf import DictConfig, OmegaConf

from fspo.files import folder_problem
from recipe.runner import SUPPORTED_VERL, ranks
from recipe.runner.faults import node
from recipe.runner.launch import loggers
from recipe.runner.launch.check_data import data_problems
from recipe.runner.launch.check_model import looks_like_a_path, model_folder, model_problems, read_model_config
from recipe.runner.launch.check_reward import reward_problems
from recipe.runner.launch.machine import ray_folder, ray_parent, starts_ray
from recipe.runner.launch.problems import MachineProblem
from recipe.runner.launch.settings import PATHS
from recipe.runner.ray_worker import HOOK

Rule = Callable[[DictConfig], Iterator[Any]]

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
#: Files that could register an agent loop.
_REGISTERS: Final = (
    *(f"{_ROLLOUT}.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path")),
    *(f"{_ROLLOUT}.agent.agent_loop_config_path", "data.custom_cls.path", f"{_MODEL}.external_lib"),
)
#: The engines that the metrics by mini-batch, the export, the supervisor and the CPU platform support.
_SERVED: Final = {"model_engine": ("dp",), f"{_ACTOR}.strategy": ("fsdp2", "fsdp"), f"{_ROLLOUT}.name": ("vllm",)}


# ---------------------------------------------------------------- the machine


def package_problems(config: DictConfig) -> Iterator[str]:
    """verl's release, and packages that a worker imports minutes later: those of every run, and of common settings."""
    installed = importlib.metadata.version("verl")
    if installed != SUPPORTED_VERL:
        yield f"verl {installed} is installed, and this is written for {SUPPORTED_VERL}: pip install the latter"
    attention = f"{_MODEL}.override_config.attn_implementation"
    implementation = OmegaConf.select(config, attention)
    is_default = implementation is None and config.actor_rollout_ref.model.use_remove_padding
    for package, needed, remedy in (
        ("vllm", True, "run `make setup`, or install requirements/gpu.txt"),
        ("transfer_queue", True, "pip install TransferQueue>=0.1.10"),
        # The kernels are asked for: where they are not compiled, flash_attn may be its cross-entropy alone.
        (
            "flash_attn_2_cuda",
            implementation == "flash_attention_2" or is_default,
            f"install requirements/gpu-flash-attn.txt, or set ++{attention}=sdpa, which is slower",
        ),
    ):
        if needed and importlib.util.find_spec(package) is None:
            yield MachineProblem(f"the package {package} is not installed: {remedy}")


def room_problems(config: DictConfig) -> Iterator[str]:
    """The disk below the run folder: can be written to, with room for the checkpoints that are kept.

    A checkpoint has 12 bytes per parameter: weights and two moments in fp32. With LoRA only the adapters have moments.
    verl saves the shard of every rank, so each replica of the shards is written in full.
    """
    root = Path(config.trainer.default_local_dir)
    if problem := folder_problem(root):
        yield MachineProblem(f"trainer.default_local_dir={root}: {problem}")
        return
    place = next(place for place in (root, *root.absolute().parents) if place.exists())
    folder, model = model_folder(config.actor_rollout_ref.model.path), read_model_config(config)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder else 0
    parameters = weights // (4 if (model.get("dtype") or model.get("torch_dtype")) == "float32" else 2)
    kept = 0 if config.trainer.save_freq <= 0 else config.trainer.max_actor_ckpt_to_keep or 1
    contents = OmegaConf.select(config, f"{_ACTOR}.checkpoint.save_contents") or ("optimizer",)
    lora = OmegaConf.select(config, f"{_MODEL}.lora_rank") or 0
    bytes_per_parameter = 12 if "optimizer" in contents and lora <= 0 else 4
    size = ranks.shards(config)
    replicas = ranks.training(config) // size
    needed, free = bytes_per_parameter * parameters * replicas * kept, shutil.disk_usage(place).free
    if not any(root.glob("global_step_*")) and free < needed:
        sharded = f"{_ACTOR}.fsdp_config.fsdp_size"
        each = f", each with {replicas} replicas of the model by {sharded}={size}" if replicas > 1 else ""
        more = f", or shard over all ranks with {sharded}=-1" if replicas > 1 else ""
        yield MachineProblem(
            f"trainer.default_local_dir={root}: {free / 2**30:.1f} GiB are free in {place}, and {kept} checkpoint(s) "
            f"need {needed / 2**30:.1f} GiB{each}: make room, or give another folder{more}"
        )


def path_problems(config: DictConfig) -> Iterator[str]:
    """Files of the user's that are not there, of which the workers would say so minutes later."""
    for key in PATHS:
        path = OmegaConf.select(config, key)
        if not path or "://" in str(path) or key.endswith(("model.path", "tokenizer_path", "generation_config")):
            continue  # a module, or said elsewhere
        is_name = key.endswith("lora_adapter_path") and not looks_like_a_path(path)  # of an adapter on the hub
        if not is_name and not Path(path).expanduser().exists():
            yield MachineProblem(f"{key}={path} is not there: correct the path")


def name_problems(config: DictConfig) -> Iterator[str]:
    """Names of functions of verl's that nobody registers, and a correction whose threshold it cannot use."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as loops
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, kl_penalty

    actor, algorithm, agent = config.actor_rollout_ref.actor, config.algorithm, config.actor_rollout_ref.rollout.agent
    loop = str(agent.default_agent_loop)
    if loop not in loops and not any(OmegaConf.select(config, key) for key in _REGISTERS):
        yield f"{_ROLLOUT}.agent.default_agent_loop={loop} is registered by nobody: give one of {', '.join(loops)}"
    if (estimator := str(algorithm.adv_estimator)) not in ADV_ESTIMATOR_REGISTRY:
        yield f"algorithm.adv_estimator={estimator} is not known: choose one of {', '.join(ADV_ESTIMATOR_REGISTRY)}"
    zeros_BT, correction = torch.zeros(1, 2), algorithm.get("rollout_correction") or {}
    calls: list[tuple[str, Any, Callable[[], object]]] = [
        (f"{_ACTOR}.kl_loss_type", actor.kl_loss_type, lambda: kl_penalty(zeros_BT, zeros_BT, actor.kl_loss_type)),
        ("algorithm.kl_penalty", algorithm.kl_penalty, lambda: kl_penalty(zeros_BT, zeros_BT, algorithm.kl_penalty)),
    ]
    calls = [call for call, on in zip(calls, (actor.use_kl_loss, algorithm.use_kl_in_reward), strict=True) if on]
    if correction.get("rollout_is") or correction.get("rollout_rs"):  # the module imports verl's engines
        from verl.trainer.ppo import rollout_corr_helper as helper

        for key, of in (
            ("rollout_is", helper.compute_rollout_correction_weights),
            ("rollout_rs", helper.compute_rollout_rejection_mask),
        ):
            arguments = (zeros_BT, zeros_BT + 1, correction.get(key), correction.get(f"{key}_threshold"))
            calls.append((f"algorithm.rollout_correction.{key}", arguments[2], functools.partial(of, *arguments)))
    for key, name, call in calls:
        try:
            if name is not None:
                call()
        except (Exception, SystemExit) as error:
            yield f"{key}={name}: {' '.join(str(error).split()) or type(error).__name__}"


def hook_problems(config: DictConfig) -> Iterator[str]:
    """A hook of the user's in Ray's workers: Ray has room for one, and a run needs it."""
    if hook := OmegaConf.select(config, f"ray_kwargs.ray_init.runtime_env.{HOOK}"):
        yield (
            f"ray_kwargs.ray_init.runtime_env.{HOOK}={hook}: a run has its own there, which keeps other users out; "
            "leave it out, and call yours from a module that your reward function imports"
        )


def node_problems(config: DictConfig) -> Iterator[str]:
    """This machine, if the run starts a Ray of its own: folders for sockets and kernels, and the GPUs' mode."""
    if starts_ray(config):
        parent, setting = ray_parent(config)
        folder = ray_folder() or node.private_path(parent) / "of_a_run"
        yield from map(MachineProblem, node.problems(folder, parent, setting, config.trainer.device != "cpu"))


# ---------------------------------------------------------------- arithmetic


def _shape_problems(config: DictConfig) -> Iterator[str]:
    model = read_model_config(config)
    yield from length_problems(config, model.get("max_position_embeddings"))
    yield from head_problems(config, model.get("num_attention_heads"))


def head_problems(config: DictConfig, heads: object) -> Iterator[str]:
    """Parallel sizes that do not divide the model's heads (``num_attention_heads``; not an integer: unknown)."""
    if not isinstance(heads, int):
        return
    for key, size in (
        (f"{_ROLLOUT}.tensor_model_parallel_size", config.actor_rollout_ref.rollout.tensor_model_parallel_size),
        (f"{_ACTOR}.ulysses_sequence_parallel_size", ranks.ulysses(config)),
    ):
        if size < 1 or heads % size:
            smaller = max(d for d in range(1, max(2, size)) if heads % d == 0)
            yield f"{key}={size} does not divide the model's {heads} attention heads: set it to {smaller}"


def _divides(larger_key: str, larger: int, smaller_key: str, smaller: int) -> Iterator[str]:
    """A sentence if ``larger`` is not a multiple of ``smaller``."""
    if smaller <= 0 or larger % smaller:
        yield f"{larger_key}={larger} is not a multiple of {smaller_key}={smaller}: change one of them so that it is"


def batch_problems(config: DictConfig) -> Iterator[str]:
    """Batches into mini-batches, mini-batches over ranks, ranks into vLLM's replicas, requests into their slots."""
    actor, rollout, number = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, ranks.training(config)
    mini, n = actor.ppo_mini_batch_size, rollout.n
    yield from _divides("data.train_batch_size", config.data.train_batch_size, f"{_ACTOR}.ppo_mini_batch_size", mini)
    sequences = mini * n
    name = "trainer.nnodes * trainer.n_gpus_per_node"
    yield from _divides(f"{_ACTOR}.ppo_mini_batch_size * {_ROLLOUT}.n", sequences, name, number)
    yield from _divides(name, number, f"{_ACTOR}.ulysses_sequence_parallel_size", ranks.ulysses(config))
    yield from _divides(name, number, f"{_ACTOR}.fsdp_config.fsdp_size", ranks.shards(config))
    micro = actor.ppo_micro_batch_size_per_gpu
    if micro is not None and not actor.use_dynamic_bsz and sequences % number == 0:
        per_rank = f"{_ACTOR}.ppo_mini_batch_size * {_ROLLOUT}.n / ranks"
        yield from _divides(per_rank, sequences // number, f"{_ACTOR}.ppo_micro_batch_size_per_gpu", micro)
    if ranks.asynchronous_mode(config) == "separate_async":  # vLLM has ranks of its own
        name, number = f"{_ROLLOUT}.nnodes * {_ROLLOUT}.n_gpus_per_node", ranks.only_generating(config)
        if rollout.nnodes == 0:
            mode = f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}"
            yield f"{_ROLLOUT}.nnodes=0 leaves {mode} no device that generates: give mode=separate_async"
    sizes = f"{_ROLLOUT}.tensor_model_parallel_size * data_parallel_size * pipeline_model_parallel_size"
    yield from _divides(name, number, sizes, ranks.of_replica(config))


_POSITIONS: Final = "the model's max_position_embeddings"


def length_problems(config: DictConfig, max_positions: object) -> Iterator[str]:
    """The longest sequence against the model's positions, vLLM's limit and the token budget of a micro-batch.

    Args:
        config: The composed configuration.
        max_positions: The model's ``max_position_embeddings``; anything but an integer: unknown.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    limits = [
        (_POSITIONS, max_positions, 1),
        (f"{_ROLLOUT}.max_model_len", rollout.max_model_len, 1),
    ]
    if actor.use_dynamic_bsz:
        # verl does not split a sequence: it stops at the first one that exceeds the budget, maybe days later.
        parts = ranks.ulysses(config)
        limits += [
            (f"{_ACTOR}.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu, parts),
            (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", rollout.log_prob_max_token_len_per_gpu, parts),
        ]
    for name, limit, parts in limits:
        if isinstance(limit, int) and longest > limit * parts:
            over = f" on each of {parts} Ulysses ranks" if parts > 1 else ""
            raised = name.startswith("actor") and not (isinstance(max_positions, int) and longest > max_positions)
            more = f"set {name}={-(-longest // parts)} or more, or " if raised else ""
            if name == _POSITIONS and OmegaConf.select(config, f"{_MODEL}.override_config.max_position_embeddings"):
                more = "override_config reaches the trainer and not vLLM: raise it in a copy of config.json, or "
            yield (
                f"data.max_prompt_length + data.max_response_length = {longest} exceeds {name} = {limit}{over}: "
                f"{more}shorten data.max_response_length"
            )


# ---------------------------------------------------------------- settings by themselves (docs/settings.md)


def engine_problems(config: DictConfig) -> Iterator[str]:
    """Engines that this package does not support; their configuration has other keys."""
    for key, served in _SERVED.items():
        value = OmegaConf.select(config, key)
        if value is not None and value not in served:
            yield f"{key}={value} is not served: set it to {' or '.join(served)}, or train with plain verl"


def setting_problems(config: DictConfig) -> Iterator[str]:
    """Settings that lose work or give wrong numbers in silence."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    val, keep, parts = rollout.val_kwargs, config.trainer.max_actor_ckpt_to_keep, ranks.ulysses(config)
    actor, algorithm, optim = config.actor_rollout_ref.actor, config.algorithm, config.actor_rollout_ref.actor.optim
    checkpoint = actor.get("checkpoint") or {}
    attention = OmegaConf.select(config, f"{_MODEL}.override_config.attn_implementation")
    for wrong, setting, why in (
        (
            val.n > 1 and val.temperature == 0,  # verl's V1 trainer does not read do_sample
            f"{_ROLLOUT}.val_kwargs.n={val.n}",
            "with val_kwargs.temperature=0 draws the same greedy response each time: set "
            f"{_ROLLOUT}.val_kwargs.temperature=1.0, or n=1",
        ),
        (
            rollout.n > 1 and rollout.full_determinism,
            f"{_ROLLOUT}.full_determinism=true",
            "gives the responses to a prompt one seed, so they are equal and their advantages 0: set it to false",
        ),
        (
            checkpoint.get("async_save"),
            f"{_ACTOR}.checkpoint.async_save=true",
            "never writes the file that a resume reads (verl issue 7952), so a restarted run would silently begin "
            "again: set it to false",
        ),
        (
            keep is not None and keep < 2,
            f"trainer.max_actor_ckpt_to_keep={keep}",
            "deletes the old checkpoint before the new one is registered, and a crash in between loses both: set it to "
            "2 or more, or to null",
        ),
        (
            parts > 1 and attention not in (None, "flash_attention_2"),
            f"{_ACTOR}.ulysses_sequence_parallel_size={parts}",
            f"with attn_implementation={attention}: verl exchanges the parts of a sequence in flash attention only, "
            "and the log-probabilities would be wrong without a word; set it to 1, or use flash_attention_2 on GPUs",
        ),
        (
            bool(read_model_config(config).get("quantization_config")),
            f"{_MODEL}.path={model.path}",
            "is a quantised checkpoint (quantization_config in its config.json), which cannot be trained: give the "
            f"weights that it was made from; vLLM quantises its copy with {_ROLLOUT}.quantization=fp8",
        ),
        (
            actor.use_kl_loss and not actor.kl_loss_coef,
            f"{_ACTOR}.kl_loss_coef={actor.kl_loss_coef}",
            f"with {_ACTOR}.use_kl_loss=true: no penalty, but a pass of the reference model in every step. Set "
            "kl_loss_coef=0.001, or use_kl_loss=false",
        ),
        # Another value than verl's own, which was therefore given.
        (
            actor.kl_loss_coef not in (0, 0.001) and not actor.use_kl_loss,
            f"{_ACTOR}.kl_loss_coef={actor.kl_loss_coef}",
            f"has no effect with use_kl_loss=false: leave it out, or give {_ACTOR}.use_kl_loss=true",
        ),
        (
            algorithm.kl_ctrl.kl_coef not in (0, 0.001) and not algorithm.use_kl_in_reward,
            f"algorithm.kl_ctrl.kl_coef={algorithm.kl_ctrl.kl_coef}",
            "has no effect with use_kl_in_reward=false: leave it out, or give algorithm.use_kl_in_reward=true",
        ),
        (
            optim.lr_warmup_steps_ratio > 0 and optim.lr_warmup_steps > 0,
            f"{_ACTOR}.optim.lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio}",
            f"has no effect beside lr_warmup_steps={optim.lr_warmup_steps}: leave it out, or give "
            f"{_ACTOR}.optim.lr_warmup_steps=-1 for a share of the run",
        ),
        (
            optim.get("min_lr_ratio")
            and {optim.lr_scheduler_type, optim.get("warmup_style") or "constant"} == {"constant"},
            f"{_ACTOR}.optim.min_lr_ratio={optim.get('min_lr_ratio')}",
            f"has no effect on a constant learning rate: leave it out, or give {_ACTOR}.optim.lr_scheduler_type=cosine",
        ),
        (
            actor.grad_clip not in (1, optim.clip_grad),
            f"{_ACTOR}.grad_clip={actor.grad_clip}",
            f"has no effect: FSDP reads the optimizer's. Give it as {_ACTOR}.optim.clip_grad",
        ),
        (
            algorithm.use_kl_in_reward and not algorithm.kl_ctrl.kl_coef,
            f"algorithm.kl_ctrl.kl_coef={algorithm.kl_ctrl.kl_coef}",
            "with algorithm.use_kl_in_reward=true: no penalty, but a pass of the reference model in every step. Set "
            "kl_coef=0.001, or use_kl_in_reward=false",
        ),
    ):
        if wrong:
            yield f"{setting} {why}"


#: The table.
RULES: Final[tuple[Rule, ...]] = (
    package_problems,
    lambda config: model_problems(config.actor_rollout_ref.model),
    data_problems,
    reward_problems,
    path_problems,
    name_problems,
    room_problems,
    hook_problems,
    node_problems,
    loggers.problems,
    batch_problems,
    _shape_problems,
    setting_problems,
)


def problems(config: DictConfig) -> list[str]:
    """What is wrong with a configuration by these rules; what only the run's machine can settle is a MachineProblem."""
    # Alone: the other rules read keys of the engines that are served.
    return list(engine_problems(config)) or [problem for rule in RULES for problem in rule(config)]
