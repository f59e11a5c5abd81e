"""What the planner takes from a composed configuration, and what it assumes about the hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.checks import ulysses
from recipe.runner.launch.commands import BadInput, split_arguments
from recipe.runner.launch.server_slots import asynchronous_mode
from recipe.runner.launch.values import value_problems

#: Bytes of one element, by verl's names of types.
ELEMENT_BYTES: Final = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}


#: Short names of the job's size.
ALIASES: Final = {"nodes": "trainer.nnodes", "gpus": "trainer.n_gpus_per_node"}


def job_arguments(arguments: Sequence[str], own: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """A command's ``own`` settings, and its other arguments as Hydra overrides, ALIASES written out.

    Raises:
        BadInput: for an argument that cannot be read.
    """
    settings, overrides = split_arguments(arguments, [*ALIASES, *own])
    return settings, overrides + [f"{key}={settings[name]}" for name, key in ALIASES.items() if name in settings]


class NotPlannableError(BadInput):
    """A setting that the planner has no formula for; the message names it."""


def _assumed(value: float, meaning: str) -> Any:
    return dataclasses.field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Hardware:
    """Assumptions about the machines; the command line sets any of them. Defaults: H100 SXM, and our guesses."""

    gpu_gb: float = _assumed(80.0, "memory of one GPU in GiB, as nvidia-smi shows it")
    gpu_tflops: float = _assumed(989.0, "dense bf16 peak of one GPU (H100 SXM: 989, NVIDIA's data sheet)")
    gpu_tb_per_s: float = _assumed(3.35, "memory bandwidth of one GPU (H100 SXM: 3.35, NVIDIA's data sheet)")
    mfu: float = _assumed(0.35, "share of that peak reached by training, communication included (a guess)")
    decode_efficiency: float = _assumed(0.6, "share of the bandwidth reached by decoding (a guess)")
    decode_overhead_ms: float = _assumed(2.0, "fixed time of one decoding step (a guess)")
    reserve_gb: float = _assumed(4.0, "GiB for CUDA contexts, NCCL, workspaces and fragmentation (a guess)")
    vllm_asleep_gb: float = _assumed(2.0, "GiB that vLLM keeps while it sleeps (a guess)")
    mean_prompt: float = _assumed(0.0, "tokens of a prompt on average; 0: an eighth of data.max_prompt_length")
    mean_response: float = _assumed(
        0.0, "tokens of a response on average; 0: fspo.reference_length, or half of the maximum"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in ("reserve_gb", "vllm_asleep_gb", "mean_prompt", "mean_response")
            if not (value > 0 or (may_be_zero and value == 0)):
                raise NotPlannableError(f"{field.name}={value:g} must be above 0")

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each assumption is, with its default."""
        fields = dataclasses.fields(cls)
        return {
            field.name: field.metadata["meaning"] + (f" [{field.default:g}]" if field.default else "")
            for field in fields
        }

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Hardware:
        """From the settings of a command line that are assumptions; others are ignored.

        Raises:
            BadInput: for a value that is not a number, or out of range.
        """
        values = {}
        for name, meaning in cls.meanings().items():
            try:
                values |= {name: float(settings[name])} if name in settings else {}
            except (TypeError, ValueError):
                raise BadInput(f"{name}={settings[name]!r} is not a number ({meaning})") from None
        return cls(**values)


class Setup:
    """The groups of a configuration, as they are, and what follows from several of their keys.

    Attributes:
        config: The whole configuration.
        data, trainer, model, actor, rollout, fsdp: Groups of the configuration; ``fsdp`` is the actor's.
        ranks: GPUs that train.
        generating, rollout_gpus: GPUs that generate; those of them that do not train.
        replica_gpus: GPUs of one of vLLM's replicas.
        shards: Ranks over which states are sharded.
        ulysses: Ranks over which a sequence is spread.
        longest: Tokens of the longest prompt with the longest response.
        sequences: Responses of one step.
        update_tokens, log_prob_tokens: Most tokens of a micro-batch on one GPU.
        mask_width: Keys in the attention mask of a query, where a mask is formed.
        master_bytes, compute_bytes, reduce_bytes, vllm_bytes: Of one element.
        reference_share: Share of the steps in which the reference model computes log-probs; None without one.
        weight_copies: Of verl, for log-probs of the weights at the beginning of the step: those, and the newest.

    Raises:
        NotPlannableError: for a value out of range, a CPU experiment, LoRA, another strategy than FSDP, or an unknown
            type of numbers.
    """

    def __init__(self, config: DictConfig) -> None:
        if wrong := list(value_problems(config)):
            raise NotPlannableError("\n".join(wrong))
        self.config, everything = config, config.actor_rollout_ref
        self.data, self.trainer = config.data, config.trainer
        self.model, self.actor, self.rollout = everything.model, everything.actor, everything.rollout
        actor, rollout, trainer = self.actor, self.rollout, self.trainer
        self.fsdp = fsdp = actor.fsdp_config
        for key, value, known, remedy in (
            ("trainer.device", trainer.device, ["cuda"], "a GPU experiment, such as experiment=qwen3_8b"),
            ("actor_rollout_ref.actor.strategy", actor.strategy, ["fsdp", "fsdp2"], "fsdp or fsdp2"),
            ("actor_rollout_ref.model.lora_rank", self.model.lora_rank, [0], "0, for a bound from above"),
        ):
            if value not in known:
                raise NotPlannableError(f"{key}={value}: the planner has no formula for it; give {remedy}")

        self.mode = asynchronous_mode(config) or "sync"
        separate = self.mode == "separate_async"
        self.ranks = trainer.nnodes * trainer.n_gpus_per_node
        self.rollout_gpus = rollout.nnodes * rollout.n_gpus_per_node if separate else 0
        self.generating = self.rollout_gpus or self.ranks
        self.replica_gpus = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
        self.shards = fsdp.fsdp_size if 0 < fsdp.fsdp_size < self.ranks else self.ranks
        self.offload_policy = fsdp.offload_policy and actor.strategy == "fsdp2"
        self.vllm_sleeps = rollout.free_cache_engine and rollout.get("enable_sleep_mode", True)

        self.longest = self.data.max_prompt_length + self.data.max_response_length
        self.sequences = self.data.train_batch_size * rollout.n
        self.ulysses = ulysses(config)
        self.update_tokens, self.log_prob_tokens = (
            (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu)
            if actor.use_dynamic_bsz
            else (
                -(-(sequences or 1) * self.longest // self.ulysses)
                for sequences in (actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu)
            )
        )
        self.attention = OmegaConf.select(self.model, "override_config.attn_implementation") or "flash_attention_2"
        self.mask_width = self.update_tokens if self.model.use_remove_padding else self.longest
        self.entropy_in_update = actor.calculate_entropy or actor.entropy_coeff != 0
        self.entropy_chunk = (
            fsdp.entropy_from_logits_chunk_size if fsdp.entropy_from_logits_with_chunking else self.log_prob_tokens
        )

        precision = fsdp.get("mixed_precision") or {}
        self.master_bytes = _element_bytes("fsdp_config.model_dtype", fsdp.model_dtype or "fp32")
        self.compute_bytes, self.reduce_bytes = (
            _element_bytes(f"fsdp_config.mixed_precision.{key}", precision.get(key, default))
            for key, default in (("param_dtype", "bf16"), ("reduce_dtype", "fp32"))
        )
        self.vllm_bytes = _element_bytes("rollout.dtype", rollout.dtype)

        # A job of this machinery need not have these settings of the method.
        measures_kl = OmegaConf.select(config, "fspo.kl_to_start")
        self.reference_share = None
        if config.algorithm.use_kl_in_reward or actor.use_kl_loss:
            self.reference_share = 1.0
        elif measures_kl:
            self.reference_share = 1 / trainer.test_freq if trainer.test_freq > 0 else 0.0
        self.weight_copies = 2 if separate and OmegaConf.select(config, "fspo.pi_old") == "actor" else 0
        self.reference_length = OmegaConf.select(config, "fspo.reference_length")


def _element_bytes(key: str, name: str) -> int:
    if name not in ELEMENT_BYTES:
        raise NotPlannableError(f"{key}={name}: the planner knows {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[name]
