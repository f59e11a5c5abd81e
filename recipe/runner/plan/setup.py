"""What the planner reads from a composed configuration, and what it assumes about the hardware."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.launch.checks import ulysses
from recipe.runner.launch.commands import BAD_INPUT, FAILED, BadInput, split_arguments
from recipe.runner.launch.compose import compose
from recipe.runner.launch.values import value_problems

#: Short names of the job's size.
ALIASES: Final = {"nodes": "trainer.nnodes", "gpus": "trainer.n_gpus_per_node"}

#: Bytes of one element, by verl's names of types.
ELEMENT_BYTES: Final = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}


def compose_job(arguments: Sequence[str], own: Collection[str] = ()) -> tuple[dict[str, Any], DictConfig]:
    """A command's own settings (those in ``own``), and the configuration that its other arguments make.

    Raises:
        BadInput, hydra.errors.HydraException: for an argument that cannot be read, or an unknown key or group.
    """
    names = [*ALIASES, *own]
    settings, overrides = split_arguments(arguments, names)
    overrides += [f"{key}={settings.pop(name)}" for name, key in ALIASES.items() if name in settings]
    return settings, compose(overrides, names)


def json_command(
    text: str | None,
    own: Collection[str],
    answer: Callable[[DictConfig, Mapping[str, Any]], dict[str, Any]],
    arguments: Sequence[str] | None,
) -> int:
    """A command that prints one JSON object about a job: what ``answer`` makes of its configuration and of ``own``.

    Returns:
        The exit status, FAILED if the object's ``status`` is "failed".
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(text)
        return 0
    try:
        settings, config = compose_job(arguments, own)
        with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM print
            found = answer(config, settings)
    except (BadInput, HydraException, OmegaConfBaseException, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(found))
    return FAILED if found.get("status") == "failed" else 0


class NotPlannableError(BadInput):
    """A setting that the planner has no formula for; the message names it."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Assumptions about the machines; each can be given on the command line. Defaults: H100 SXM, and our guesses."""

    gpu_gb: float = 80.0
    gpu_tflops: float = 989.0
    gpu_tb_per_s: float = 3.35
    mfu: float = 0.35
    decode_efficiency: float = 0.6
    decode_overhead_ms: float = 2.0
    host_gb_per_s: float = 25.0
    reserve_gb: float = 4.0
    vllm_asleep_gb: float = 2.0
    mean_prompt: float = 0.0
    mean_response: float = 0.0
    sigma: float = 0.03
    job_hours: float = 24.0

    #: Meaning and source of each, for --help and for the printed assumptions.
    MEANING = {  # noqa: RUF012  (not a field: it has no annotation)
        "gpu_gb": "memory of one GPU in GiB, as nvidia-smi shows it",
        "gpu_tflops": "dense bf16 peak of one GPU (H100 SXM: 989, NVIDIA's data sheet)",
        "gpu_tb_per_s": "memory bandwidth of one GPU (H100 SXM: 3.35, NVIDIA's data sheet)",
        "mfu": "share of that peak reached by training and log-probs, communication included (a guess)",
        "decode_efficiency": "share of the bandwidth reached by decoding (a guess)",
        "decode_overhead_ms": "fixed time of one decoding step (a guess)",
        "host_gb_per_s": "speed of offloading, per GPU (a guess; PCIe 5 x16 has 63 in theory)",
        "reserve_gb": "GiB for CUDA contexts, NCCL, workspaces and fragmentation (a guess)",
        "vllm_asleep_gb": "GiB that vLLM keeps while it sleeps (a guess)",
        "mean_prompt": "tokens of a prompt on average; 0: an eighth of data.max_prompt_length",
        "mean_response": "tokens of a response on average; 0: fspo.reference_length, or half of the maximum",
        "sigma": "standard deviation of a token's log-ratio, for the acceptance at the longest response",
        "job_hours": "time limit of one job in hours, for the number of jobs",
    }

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in ("reserve_gb", "vllm_asleep_gb", "mean_prompt", "mean_response")
            if not (value > 0 or (may_be_zero and value == 0)):
                raise NotPlannableError(f"{field.name}={value:g} must be above 0")
        for name in ("mfu", "decode_efficiency"):
            if getattr(self, name) > 1:
                raise NotPlannableError(f"{name}={getattr(self, name):g} is a share: give a value up to 1")


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of one run that decide its memory and time. ``*_bytes``: of one element."""

    nodes: int
    gpus: int
    shards: int
    ulysses: int
    master_bytes: int
    compute_bytes: int
    reduce_bytes: int
    param_offload: bool
    optimizer_offload: bool
    offload_policy: bool
    fsdp2: bool
    defer_gradient_sync: bool
    gradient_checkpointing: bool
    attention: str
    packed: bool
    flash_cross_entropy: bool
    fused_logits: bool
    entropy_in_update: bool
    entropy_chunk: int
    reference: bool
    reference_share: float
    dynamic: bool
    micro_sequences: int
    update_tokens: int
    log_prob_tokens: int
    max_prompt: int
    max_response: int
    prompts: int
    mini_prompts: int
    n: int
    epochs: int
    tensor_parallel: int
    replica_gpus: int
    gpu_memory_utilization: float
    vllm_sleeps: bool
    vllm_bytes: int
    bucket_bytes: float
    max_num_seqs: int
    max_num_batched_tokens: int
    reference_length: float | None
    mode: str
    rollout_gpus: int
    weight_copies: int

    @property
    def ranks(self) -> int:
        """GPUs that train."""
        return self.nodes * self.gpus

    @property
    def generating(self) -> int:
        """GPUs that generate: those that train, or in ``separate_async`` others."""
        return self.rollout_gpus or self.ranks

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt + self.max_response

    @property
    def sequences(self) -> int:
        """Responses of one step."""
        return self.prompts * self.n

    @property
    def tokens_per_gpu(self) -> int:
        """Most tokens of one micro-batch of the update on one GPU."""
        return self.update_tokens if self.dynamic else -(-self.micro_sequences * self.longest // self.ulysses)

    @property
    def mask_width(self) -> int:
        """Keys in the attention mask of a query, where a mask is formed."""
        return self.tokens_per_gpu if self.packed else self.longest


def read_setup(config: DictConfig) -> Setup:
    """The settings that matter here, from the composed configuration.

    Raises:
        NotPlannableError: for a value out of range, a CPU experiment, LoRA, another strategy than FSDP, or an unknown
            type of numbers.
    """
    if wrong := list(value_problems(config)):
        raise NotPlannableError("\n".join(wrong))
    everything = config.actor_rollout_ref
    actor, rollout, model, trainer = everything.actor, everything.rollout, everything.model, config.trainer
    fsdp = actor.fsdp_config
    if trainer.device != "cuda":
        raise NotPlannableError(
            f"trainer.device={trainer.device}: the planner describes runs on GPUs; give a GPU experiment, such as "
            "experiment=qwen3_8b"
        )
    if actor.strategy not in ("fsdp", "fsdp2"):
        raise NotPlannableError(f"actor_rollout_ref.actor.strategy={actor.strategy}: the planner knows fsdp and fsdp2")
    if model.lora_rank > 0:
        raise NotPlannableError(
            f"actor_rollout_ref.model.lora_rank={model.lora_rank}: the planner has no formula for LoRA"
        )
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    precision = fsdp.get("mixed_precision") or {}
    attention = OmegaConf.select(model, "override_config.attn_implementation") or "flash_attention_2"
    dynamic = bool(actor.use_dynamic_bsz)
    parts = ulysses(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    mode = str(trainer.v1.trainer_mode).removeprefix("fspo").removeprefix("_") or "sync"
    separate = mode == "separate_async"
    return Setup(
        nodes=trainer.nnodes,
        gpus=trainer.n_gpus_per_node,
        shards=fsdp.fsdp_size if 0 < fsdp.fsdp_size < ranks else ranks,
        ulysses=parts,
        master_bytes=_element_bytes("fsdp_config.model_dtype", fsdp.model_dtype or "fp32"),
        compute_bytes=_element_bytes("fsdp_config.mixed_precision.param_dtype", precision.get("param_dtype", "bf16")),
        reduce_bytes=_element_bytes("fsdp_config.mixed_precision.reduce_dtype", precision.get("reduce_dtype", "fp32")),
        param_offload=bool(fsdp.param_offload),
        optimizer_offload=bool(fsdp.optimizer_offload),
        offload_policy=bool(fsdp.offload_policy) and actor.strategy == "fsdp2",
        fsdp2=actor.strategy == "fsdp2",
        defer_gradient_sync=bool(fsdp.use_no_sync_for_gradient_accumulation),
        gradient_checkpointing=bool(model.enable_gradient_checkpointing),
        attention=attention,
        packed=bool(model.use_remove_padding),
        # verl uses flash-attn's cross-entropy wherever the package is installed; without it attention is another, too.
        flash_cross_entropy=attention == "flash_attention_2",
        fused_logits=bool(model.use_fused_kernels),
        entropy_in_update=bool(actor.calculate_entropy) or actor.entropy_coeff != 0,
        entropy_chunk=fsdp.entropy_from_logits_chunk_size if fsdp.entropy_from_logits_with_chunking else 0,
        reference=bool(config.algorithm.use_kl_in_reward or actor.use_kl_loss or config.fspo.kl_to_start),
        reference_share=1.0
        if config.algorithm.use_kl_in_reward or actor.use_kl_loss
        else (config.fspo.kl_to_start and trainer.test_freq > 0) / max(1, trainer.test_freq),
        dynamic=dynamic,
        micro_sequences=actor.ppo_micro_batch_size_per_gpu or 1,
        update_tokens=actor.ppo_max_token_len_per_gpu,
        log_prob_tokens=rollout.log_prob_max_token_len_per_gpu
        if dynamic
        else -(-(rollout.log_prob_micro_batch_size_per_gpu or 1) * longest // parts),
        max_prompt=config.data.max_prompt_length,
        max_response=config.data.max_response_length,
        prompts=config.data.train_batch_size,
        mini_prompts=actor.ppo_mini_batch_size,
        n=rollout.n,
        epochs=actor.ppo_epochs,
        tensor_parallel=rollout.tensor_model_parallel_size,
        replica_gpus=rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size,
        gpu_memory_utilization=float(rollout.gpu_memory_utilization),
        vllm_sleeps=bool(rollout.free_cache_engine and rollout.get("enable_sleep_mode", True)),
        vllm_bytes=_element_bytes("rollout.dtype", rollout.dtype),
        bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes * 2.0**20,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        reference_length=config.fspo.reference_length,
        mode=mode,
        rollout_gpus=rollout.nnodes * rollout.n_gpus_per_node if separate else 0,
        # verl's, for log-probs of the weights at the beginning of the step: those, and the newest.
        weight_copies=2 if separate and config.fspo.pi_old == "actor" else 0,
    )


def _element_bytes(key: str, name: str) -> int:
    if name not in ELEMENT_BYTES:
        raise NotPlannableError(f"{key}={name}: the planner knows {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[name]
