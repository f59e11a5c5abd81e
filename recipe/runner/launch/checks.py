"""The rules before Ray starts: each mistake costs hours on GPUs, or gives wrong numbers in silence.

A rule yields one sentence a problem, with the key, the value and what to give instead. What verl itself refuses within
its first minutes has no rule.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from fspo.files import folder_problem, read_object
from recipe.runner import SUPPORTED_VERL, ranks
from recipe.runner.launch.check_data import data_problems
from recipe.runner.launch.settings import PATHS, MachineProblem
from recipe.runner.launch.trials import name_problems, reward_problems
from recipe.runner.ray_worker import HOOK

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_HOOK: Final = f"ray_kwargs.ray_init.runtime_env.{HOOK}"
#: The engines that the metrics by mini-batch, the export, the supervisor and the CPU platform support.
_SERVED: Final = {"model_engine": ("dp",), f"{_ACTOR}.strategy": ("fsdp2", "fsdp"), f"{_ROLLOUT}.name": ("vllm",)}
#: One of them is in every folder with a tokenizer; the last also beside files of other names, such as tiktoken.model.
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
#: Keys of which a value may also be a name on the hub, or of a choice.
_OR_NAMES: Final = ("lora_adapter_path", "tokenizer_path", "generation_config")


def package_problems(model: DictConfig) -> Iterator[str]:
    """verl's release, and packages that a worker imports minutes later."""
    installed = importlib.metadata.version("verl")
    if installed != SUPPORTED_VERL:
        yield f"verl {installed} is installed, and this is written for {SUPPORTED_VERL}: pip install the latter"
    needed = {
        "vllm": "run `make setup`, or install requirements/gpu.txt",
        "transfer_queue": "pip install TransferQueue>=0.1.10",
    }
    key, default = "override_config.attn_implementation", "flash_attention_2" if model.use_remove_padding else None
    if (OmegaConf.select(model, key) or default) == "flash_attention_2":
        # Of the kernels: where they are not compiled, flash_attn may be its cross-entropy alone.
        remedy = f"install requirements/gpu-flash-attn.txt, or set ++{_MODEL}.{key}=sdpa, which is slower"
        needed["flash_attn_2_cuda"] = remedy
    for package, remedy in needed.items():
        if importlib.util.find_spec(package) is None:
            yield MachineProblem(f"the package {package} is not installed: {remedy}")


def room_problems(config: DictConfig, model: Mapping[str, Any]) -> Iterator[str]:
    """The disk below the run folder: can be written to, with room for the checkpoints that are kept.

    A checkpoint has 12 bytes per parameter: weights and two moments in fp32. With LoRA only the adapters have moments.
    verl saves the shard of every rank, so each replica of the shards is written in full.
    """
    root = Path(config.trainer.default_local_dir)
    setting = f"trainer.default_local_dir={root}"
    if problem := folder_problem(root):
        yield MachineProblem(f"{setting}: {problem}")
        return
    place = next(place for place in (root, *root.absolute().parents) if place.exists())
    folder = model_folder(config.actor_rollout_ref.model.path)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder else 0
    parameters = weights // (4 if (model.get("dtype") or model.get("torch_dtype")) == "float32" else 2)
    kept = 0 if config.trainer.save_freq <= 0 else config.trainer.max_actor_ckpt_to_keep or 1
    contents = OmegaConf.select(config, f"{_ACTOR}.checkpoint.save_contents") or ("optimizer",)
    has_moments = "optimizer" in contents and not OmegaConf.select(config, f"{_MODEL}.lora_rank")
    replicas = ranks.training(config.trainer) // ranks.of_a_copy(config.trainer, config.actor_rollout_ref.actor)
    needed, free = (12 if has_moments else 4) * parameters * replicas * kept, shutil.disk_usage(place).free
    if free < needed and not any(root.glob("global_step_*")):
        yield MachineProblem(
            f"{setting}: {free / 2**30:.1f} GiB are free, and {kept} checkpoint(s) need {needed / 2**30:.1f} GiB: make "
            "room, or give another folder"
        )


def path_problems(config: DictConfig) -> Iterator[str]:
    """Files of the user's that are not there, of which the workers would say so minutes later."""
    for key in PATHS:
        path = str(OmegaConf.select(config, key) or "")
        if not path or "://" in path or key.startswith((f"{_MODEL}.path", "reward.")):
            continue  # a module, or said elsewhere
        is_name = key.endswith(_OR_NAMES) and not looks_like_a_path(path)
        if not is_name and not Path(path).expanduser().exists():
            yield MachineProblem(f"{key}={path} is not there: correct the path")


def logger_problems(names: str | Sequence[str]) -> Iterator[str]:
    """Loggers that verl does not have, or that are not installed."""
    from verl.utils.tracking import Tracking

    known = Tracking.supported_backend
    for name in [names] if isinstance(names, str) else names:
        if name not in known:
            yield f"trainer.logger: {name} is none of verl's loggers: choose from {', '.join(known)}"
        elif name not in ("console", "file", "vemlp_wandb") and importlib.util.find_spec(name) is None:
            yield MachineProblem(f"trainer.logger: {name} is not installed: pip install {name}")


def looks_like_a_path(model: str) -> bool:
    """Whether a model is named by a path, and not by its name on the hub."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).exists()


def model_folder(model: str) -> Path | None:
    """The folder of a model on this machine, the local hub cache included; None if it is not there."""
    folder = Path(model).expanduser()
    if folder.is_dir() or looks_like_a_path(model):
        return folder if folder.is_dir() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def model_problems(model: DictConfig) -> Iterator[str]:
    """A model that is not there or incomplete; a tokenizer that is missing, or has no chat template."""
    path, is_path, folder = model.path, looks_like_a_path(model.path), model_folder(model.path)
    setting = f"{_MODEL}.path={path!r}"
    if folder is None or not (folder / "config.json").is_file():
        if is_path:
            yield MachineProblem(
                f"{setting} is not a folder with a config.json: give one that holds a model in Hugging Face format (of "
                "a checkpoint `python -m recipe.runner.export` makes one), or a name on the hub"
            )
        elif os.environ.get("HF_HUB_OFFLINE") == "1":
            yield MachineProblem(f"{setting} is not in the local hub cache and HF_HUB_OFFLINE=1: download it")
        return
    # A file of less than 1 kB in place of weights is the pointer that git-lfs leaves.
    sizes = {file.name: file.stat().st_size for file in (*folder.glob("*.safetensors"), *folder.glob("*.bin"))}
    shards = set(read_object(folder / "model.safetensors.index.json").get("weight_map", {}).values())
    absent = sorted(name for name in shards | sizes.keys() if sizes.get(name, 0) < 1024)
    if is_path and (absent or not sizes):
        what = ", ".join(absent[:3]) or "weights (*.safetensors or *.bin)"
        yield MachineProblem(f"{setting} is incomplete: {what} is missing or a git-lfs pointer; download it again")
    name = model.get("tokenizer_path") or path
    setting = f"{_MODEL}.{'tokenizer_path' if model.get('tokenizer_path') else 'path'}={name!r}"
    place = model_folder(name)
    if place is None or not looks_like_a_path(name):
        return  # on the hub
    settings = read_object(place / "tokenizer_config.json")
    if not any((place / file).is_file() for file in _TOKENIZER_FILES):
        yield MachineProblem(f"{setting} has no tokenizer ({_TOKENIZER_FILES[0]}): copy its files there")
    elif not (settings.get("chat_template") or any(place.glob("chat_template*")) or model.get("custom_chat_template")):
        yield (
            f"{setting} has a tokenizer without a chat template, and prompts are lists of messages: add "
            f"chat_template.jinja to the folder, or set {_MODEL}.custom_chat_template"
        )


def _ulysses(actor: DictConfig) -> int:
    """The ranks over which a sequence is spread."""
    # The actor's key is the older of the two; verl copies it into the other.
    return int(max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size))


def size_problems(config: DictConfig, model: Mapping[str, Any]) -> Iterator[str]:
    """Batches into mini-batches, mini-batches over ranks, ranks into replicas, attention heads over parallel sizes."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mini, n, ulysses = f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n", f"{_ACTOR}.ulysses_sequence_parallel_size"
    training, by_rank = "trainer.nnodes * trainer.n_gpus_per_node", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    tensor_key, tensor = f"{_ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size
    number, sequences, parts = ranks.training(config.trainer), actor.ppo_mini_batch_size * rollout.n, _ulysses(actor)
    of_a_copy, micro = ranks.of_a_copy(config.trainer, actor), actor.ppo_micro_batch_size_per_gpu
    generating = ranks.only_generating(config.trainer, rollout)
    own = f"{_ROLLOUT}.nnodes * {_ROLLOUT}.n_gpus_per_node" if generating else training  # vLLM's ranks
    of_replica = tensor * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    pairs = [
        ("data.train_batch_size", config.data.train_batch_size, mini, actor.ppo_mini_batch_size),
        (f"{mini} * {n}", sequences, training, number),
        (training, number, ulysses, parts),
        (training, number, f"{_ACTOR}.fsdp_config.fsdp_size", of_a_copy),
        (own, generating or number, f"{tensor_key} * data_parallel_size * pipeline_model_parallel_size", of_replica),
    ]
    if micro is not None and not actor.use_dynamic_bsz and sequences % number == 0:
        pairs.append((f"{mini} * {n} / ranks", sequences // number, by_rank, micro))
    if isinstance(heads := model.get("num_attention_heads"), int):
        pairs += [("the model's attention heads", heads, *by) for by in ((tensor_key, tensor), (ulysses, parts))]
    for larger_key, larger, key, value in pairs:
        if value <= 0 or larger % value:
            yield f"{key}={value} does not divide {larger_key}={larger}: change one of them"


def length_problems(config: DictConfig, model: Mapping[str, Any]) -> Iterator[str]:
    """The longest sequence against the model's positions, vLLM's limit and the token budget of a micro-batch."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    for name in ("prompt_length", "response_length"):  # there verl's agent loops cut in silence
        if (other := rollout[name]) != (limit := config.data[f"max_{name}"]):
            yield f"{_ROLLOUT}.{name}={other} differs from data.max_{name}={limit}: give the latter alone"
    limits = {"the model's max_position_embeddings": model.get("max_position_embeddings")}
    limits[f"{_ROLLOUT}.max_model_len"] = rollout.max_model_len
    if actor.use_dynamic_bsz:
        # verl does not split a sequence: it stops at the first one that exceeds the budget, maybe days later.
        for key in (f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"):
            if (limit := OmegaConf.select(config, key)) is not None:
                limits[f"{key} (by Ulysses ranks)"] = limit * _ulysses(actor)
    for name, limit in limits.items():
        if isinstance(limit, int) and longest > limit:
            yield (
                f"data.max_prompt_length + data.max_response_length = {longest} exceeds {name} = {limit}: raise it, or "
                "shorten data.max_response_length"
            )


def setting_problems(config: DictConfig, model: Mapping[str, Any]) -> Iterator[str]:
    """Settings that lose work or give wrong numbers in silence."""
    actor, rollout, kl_ctrl = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.algorithm.kl_ctrl
    optim, keep, val = actor.optim, config.trainer.max_actor_ckpt_to_keep, rollout.val_kwargs
    attention = OmegaConf.select(config, f"{_MODEL}.override_config.attn_implementation")
    is_constant = {optim.lr_scheduler_type, optim.get("warmup_style") or "constant"} == {"constant"}
    #: By key, whether it is wrong, and why.
    rules = {
        f"{_ROLLOUT}.val_kwargs.n": (
            val.n > 1 and val.temperature == 0,  # verl's V1 trainer does not read do_sample
            "with val_kwargs.temperature=0 draws the same greedy response each time: set temperature=1.0, or n=1",
        ),
        f"{_ROLLOUT}.full_determinism": (
            rollout.n > 1 and rollout.full_determinism,
            "gives the responses to a prompt one seed, so they are equal and their advantages 0: set it to false",
        ),
        f"{_ACTOR}.checkpoint.async_save": (
            OmegaConf.select(actor, "checkpoint.async_save"),
            "never writes the file that a resume reads (verl issue 7952): set it to false",
        ),
        **{
            f"{_ACTOR}.checkpoint.{name}": (
                "model" not in (actor.checkpoint[name] or ()),
                "would let a resume begin with the first weights: give [model,optimizer,extra], hf_model beside them",
            )
            for name in ("save_contents", "load_contents")
        },
        "trainer.max_actor_ckpt_to_keep": (
            keep is not None and keep < 2,
            "deletes the old checkpoint before the new one is registered: set it to 2 or more, or to null",
        ),
        f"{_ACTOR}.ulysses_sequence_parallel_size": (
            _ulysses(actor) > 1 and attention not in (None, "flash_attention_2"),
            f"(or that of fsdp_config) gives wrong log-probabilities with attn_implementation={attention}: set it to 1",
        ),
        f"{_MODEL}.path": (
            model.get("quantization_config"),
            "is a quantised checkpoint (quantization_config in its config.json), which cannot be trained: give the "
            f"weights that it was made from; vLLM quantises its copy with {_ROLLOUT}.quantization=fp8",
        ),
        _HOOK: (  # Ray has room for one
            OmegaConf.select(config, _HOOK),
            "would replace the run's own, which signs messages and keeps signals blocked: leave it out",
        ),
    }
    # A value that is not verl's own was given.
    for key, is_unread, instead in (
        (f"{_ACTOR}.kl_loss_coef", actor.kl_loss_coef not in (0, 0.001) and not actor.use_kl_loss, "use_kl_loss=true"),
        (
            "algorithm.kl_ctrl.kl_coef",
            kl_ctrl.kl_coef not in (0, 0.001) and not config.algorithm.use_kl_in_reward,
            "use_kl_in_reward=true",
        ),
        (
            f"{_ACTOR}.optim.lr_warmup_steps_ratio",
            optim.lr_warmup_steps_ratio > 0 and optim.lr_warmup_steps > 0,
            "lr_warmup_steps=-1",
        ),
        (f"{_ACTOR}.optim.min_lr_ratio", optim.get("min_lr_ratio") and is_constant, "lr_scheduler_type=cosine"),
        (f"{_ACTOR}.grad_clip", actor.grad_clip not in (1, optim.clip_grad), "optim.clip_grad, which FSDP reads"),
    ):
        rules[key] = (is_unread, f"has no effect here: leave it out, or give {instead}")
    for key, (is_wrong, why) in rules.items():
        if is_wrong:
            value = OmegaConf.select(config, key)
            yield f"{key}={str(value).lower() if isinstance(value, bool) else value} {why}"


def problems(config: DictConfig) -> list[str]:
    """What is wrong with a configuration by these rules; what only the run's machine can settle is a MachineProblem."""
    folder = model_folder(config.actor_rollout_ref.model.path)
    model = {} if folder is None else read_object(folder / "config.json")  # empty for one that would come from the hub
    served = [
        f"{key}={value} is not served: set it to {' or '.join(values)}, or train with plain verl"
        for key, values in _SERVED.items()
        if (value := OmegaConf.select(config, key)) is not None and value not in values
    ]
    if served:
        return served  # alone: the other rules read keys of the engines that are served
    return [
        *package_problems(config.actor_rollout_ref.model),
        *model_problems(config.actor_rollout_ref.model),
        *data_problems(config.data),
        *path_problems(config),
        *room_problems(config, model),
        *logger_problems(config.trainer.logger),
        *size_problems(config, model),
        *length_problems(config, model),
        *setting_problems(config, model),
        *name_problems(config),
        *reward_problems(config),
    ]
