"""What the planner takes from a composed configuration, and what it assumes about the hardware."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, Field, ValidationError

from recipe.runner import ranks
from recipe.runner.launch.commands import BadInput, split_arguments
from recipe.runner.launch.compose import parsed
from recipe.runner.launch.job import Job
from recipe.runner.launch.values import Positive, PositiveOrZero, value_problems

#: Bytes of one element, by verl's names of types.
ELEMENT_BYTES: Final = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
#: Short names of the job's size.
ALIASES: Final = {"nodes": "trainer.nnodes", "gpus": "trainer.n_gpus_per_node"}
_ATTENTION: Final = "override_config.attn_implementation"
#: What the formulas are written for; the last column is the remedy for another value.
_COVERED: Final = (
    ("trainer.device", ("cuda",), "take a GPU experiment, such as experiment=qwen3_8b"),
    ("actor_rollout_ref.actor.strategy", ("fsdp2",), "give fsdp2"),
    ("actor_rollout_ref.model.lora_rank", (0,), "give 0, for a bound from above"),
    (f"actor_rollout_ref.model.{_ATTENTION}", ("flash_attention_2", "sdpa", None), "give flash_attention_2, or sdpa"),
)


def job_arguments(arguments: Sequence[str], own: Collection[str]) -> tuple[dict[str, Any], list[Override]]:
    """A command's ``own`` settings, and its other arguments as Hydra overrides, ALIASES written out.

    Raises:
        BadInput: for an argument that cannot be read.
    """
    settings, overrides = split_arguments(arguments, [*ALIASES, *own])
    given = [f"{key}={settings[name]}" for name, key in ALIASES.items() if name in settings]
    return settings, overrides + parsed(given)


class Hardware(BaseModel, frozen=True):
    """Assumptions about machines; the command line sets any of them. Defaults: H100 SXM.

    The guesses of memory are 7 GiB together; the planner has no others. On an H100 vLLM alone kept 2.0 GiB while it
    slept, with one GPU a replica: 1.0 of CUDA graphs, and its context (docs/performance.md#on-a-gpu).
    """

    gpu_gb: Positive = Field(79.2, description="GiB of one GPU, as CUDA says (H100 SXM; nvidia-smi counts more: 79.6)")
    reserve_gb: PositiveOrZero = Field(
        4.0, description="GiB for CUDA contexts, NCCL, workspaces, fragmentation (a guess)"
    )
    vllm_context_gb: PositiveOrZero = Field(
        1.0, description="GiB of vLLM's own CUDA context and NCCL, beside its share of a GPU (a guess)"
    )
    vllm_asleep_gb: PositiveOrZero = Field(
        2.0, description="GiB of its share that vLLM keeps while it sleeps: CUDA graphs (1.0 measured), NCCL (a guess)"
    )
    host_gb: Positive = Field(512.0, description="GiB of a node's memory that may be pinned (half of 1 TiB)")

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each assumption is, with its default."""
        fields = cls.model_fields.items()
        return {name: f"{field.description}" + f" [{field.default:g}]" * (field.default > 0) for name, field in fields}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Hardware:
        """From the settings of a command line that are assumptions; others are ignored.

        Raises:
            BadInput: for a value that is not a number, or out of range.
        """
        try:
            return cls(**settings)
        except ValidationError as error:
            wrong = (f"{problem['loc'][0]}={problem['input']!r}: {problem['msg']}" for problem in error.errors())
            raise BadInput("\n".join(wrong)) from None


def refuse_uncovered(config: DictConfig) -> None:
    """Raise BadInput for a value out of range, or without a formula: a CPU experiment, LoRA, other strategies."""
    wrong = list(value_problems(config, classes=False))
    for key, covered, remedy in _COVERED:
        if (value := OmegaConf.select(config, key)) not in covered:
            wrong.append(f"{key}={value}: the planner has no formula for it; {remedy}")
    if wrong:
        raise BadInput("\n".join(wrong))


class Setup:
    """The groups of a configuration, as they are, and what follows from several of their keys.

    Attributes:
        config: The whole configuration.
        data, trainer, model, actor, rollout, fsdp: Groups of the configuration; ``fsdp`` is the actor's.
        ranks, rollout_gpus: GPUs that train, and GPUs that only generate.
        copy_gpus: GPUs over which vLLM splits one copy of the weights; each data-parallel rank of a replica has one.
        shards, ulysses: Ranks over which states are sharded, and over which a sequence is spread.
        longest: Tokens of the longest prompt with the longest response.
        update_tokens, log_prob_tokens: Most tokens of a micro-batch on one GPU.
        mask_width: Keys in the attention mask of a query; None: flash-attn, which forms no mask.
        flash_cross_entropy: Whether flash-attn's cross-entropy computes the log-probs: with its attention, and where
            the package is installed here (requirements/install-gpu.sh installs its cross-entropy alone, too).
        master_bytes, compute_bytes, reduce_bytes, vllm_bytes: Of one element.
        reference_bytes: Of one element of the reference model.
        has_reference: Whether there is a reference model.
        weight_copies: Of verl, for log-probs of the weights at the beginning of the step: those, and the newest.
    """

    def __init__(self, config: DictConfig, job: Job) -> None:
        self.config, everything = config, config.actor_rollout_ref
        self.data, self.trainer = config.data, config.trainer
        self.model, self.actor, self.rollout = everything.model, everything.actor, everything.rollout
        actor, rollout = self.actor, self.rollout
        self.fsdp = fsdp = actor.fsdp_config

        separate = ranks.asynchronous_mode(config) == "separate_async"
        self.ranks, self.rollout_gpus = ranks.training(config), ranks.only_generating(config)
        self.copy_gpus = ranks.of_replica(config) // rollout.data_parallel_size
        self.shards = ranks.shards(config)
        self.vllm_sleeps = rollout.free_cache_engine and rollout.get("enable_sleep_mode", True)

        self.longest = self.data.max_prompt_length + self.data.max_response_length
        self.ulysses = ranks.ulysses(config)
        if actor.use_dynamic_bsz:
            self.update_tokens = actor.ppo_max_token_len_per_gpu
            self.log_prob_tokens = rollout.log_prob_max_token_len_per_gpu
        else:
            self.update_tokens, self.log_prob_tokens = (
                -(-(sequences or 1) * self.longest // self.ulysses)
                for sequences in (actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu)
            )
        self.mask_width: int | None = None
        if OmegaConf.select(self.model, _ATTENTION) == "sdpa":
            self.mask_width = self.update_tokens if self.model.use_remove_padding else self.longest
        # verl uses it wherever it is installed, with the attention of another package, too.
        self.flash_cross_entropy = self.mask_width is None or find_spec("flash_attn") is not None
        self.entropy_in_update = actor.calculate_entropy or actor.entropy_coeff != 0

        precision = fsdp.get("mixed_precision") or {}
        self.master_bytes = ELEMENT_BYTES[fsdp.model_dtype or "fp32"]
        self.compute_bytes = ELEMENT_BYTES[precision.get("param_dtype") or "bf16"]
        self.reduce_bytes = ELEMENT_BYTES[precision.get("reduce_dtype") or "fp32"]
        self.vllm_bytes = ELEMENT_BYTES[rollout.dtype]
        self.reference_bytes = ELEMENT_BYTES[everything.ref.fsdp_config.model_dtype or "bf16"]

        passes = job.passes(config)
        by_penalty = config.algorithm.use_kl_in_reward or actor.use_kl_loss
        self.has_reference = bool(by_penalty or passes.reference_at_validations)
        self.weight_copies = 2 if separate and passes.keeps_old_weights else 0
