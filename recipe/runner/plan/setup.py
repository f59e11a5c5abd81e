"""What the planner takes from a composed configuration, and what it assumes about the hardware."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, Field, ValidationError

from recipe.runner.launch.checks import ulysses
from recipe.runner.launch.commands import BadInput, split_arguments
from recipe.runner.launch.job import Job
from recipe.runner.launch.server_slots import asynchronous_mode
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


def job_arguments(arguments: Sequence[str], own: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """A command's ``own`` settings, and its other arguments as Hydra overrides, ALIASES written out.

    Raises:
        BadInput: for an argument that cannot be read.
    """
    settings, overrides = split_arguments(arguments, [*ALIASES, *own])
    return settings, overrides + [f"{key}={settings[name]}" for name, key in ALIASES.items() if name in settings]


class Hardware(BaseModel, frozen=True):
    """Assumptions about the machines; the command line sets any of them. Defaults: H100 SXM, and our guesses."""

    gpu_gb: Positive = Field(79.2, description="GiB of one GPU, as CUDA says (H100 SXM; nvidia-smi counts more: 79.6)")
    gpu_tflops: Positive = Field(989.0, description="dense bf16 peak of one GPU (H100 SXM: 989, NVIDIA's data sheet)")
    gpu_tb_per_s: Positive = Field(3.35, description="memory bandwidth of a GPU (H100 SXM: 3.35, NVIDIA's data sheet)")
    mfu: Positive = Field(0.35, description="share of that peak reached by training within a node (a guess)")
    decode_efficiency: Positive = Field(0.7, description="share of the bandwidth reached by decoding (a guess)")
    decode_overhead_ms: Positive = Field(2.0, description="fixed time of one decoding step (a guess)")
    allreduce_us: PositiveOrZero = Field(20.0, description="one all-reduce of vLLM's tensor parallelism (a guess)")
    front_end: Positive = Field(49_800.0, description="tokens/s of a server process (python -m benchmarks.front_end)")
    fill: PositiveOrZero = Field(0.0, description="fill of the update's packs; 0: simulated")
    fill_log_probs: PositiveOrZero = Field(0.0, description="fill of the packs of log-probs; 0: as the update's")
    slowest: PositiveOrZero = Field(0.0, description="slowest rank's work over the mean; 0: simulated, in tokens")
    network_gb_per_s: Positive = Field(400.0, description="of a node, each way (8 cards of 400 Gb/s)")
    host_gb_per_s: Positive = Field(25.0, description="between a GPU and pinned host memory (a guess)")
    disk_gb_per_s: Positive = Field(2.0, description="of a save, all nodes together (a guess)")
    sync_s: PositiveOrZero = Field(1.5, description="s a step and 1e9 parameters to renew vLLM's weights (a guess)")
    driver_ms: PositiveOrZero = Field(1.5, description="ms a step and response for rewards and driver (a guess)")
    startup_s: PositiveOrZero = Field(300.0, description="seconds from a job's start to its first step (a guess)")
    job_hours: Positive = Field(24.0, description="hours of a job, after which the run starts again (slurm/)")
    val_prompts: PositiveOrZero = Field(600.0, description="problems of a validation (the 8B job's four sets: 600)")
    reserve_gb: PositiveOrZero = Field(
        4.0, description="GiB for CUDA contexts, NCCL, workspaces, fragmentation (a guess)"
    )
    host_gb: Positive = Field(512.0, description="GiB of a node's memory that may be pinned (half of 1 TiB)")
    disk_gb: Positive = Field(1024.0, description="GiB of disk that a run's checkpoints may take (a guess)")
    vllm_context_gb: PositiveOrZero = Field(
        1.0, description="GiB of vLLM's own CUDA context and NCCL, beside its share of a GPU (a guess)"
    )
    vllm_asleep_gb: PositiveOrZero = Field(
        1.0, description="GiB of its share that vLLM keeps while it sleeps: CUDA graphs (a guess)"
    )
    mean_prompt: PositiveOrZero = Field(
        0.0, description="mean tokens of a prompt; 0: an eighth of data.max_prompt_length"
    )
    mean_response: PositiveOrZero = Field(
        0.0, description="mean tokens of a response; 0: the usual length of the job, or half the most"
    )

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
            wrong = (f"{each['loc'][0]}={each['input']!r}: {each['msg']}" for each in error.errors())
            raise BadInput("\n".join(wrong)) from None


def refuse_uncovered(config: DictConfig) -> None:
    """Raise BadInput for a value out of range, or without a formula: a CPU experiment, LoRA, other strategies."""
    wrong = list(value_problems(config))
    for key, covered, remedy in _COVERED:
        if (value := OmegaConf.select(config, key)) not in covered:
            wrong.append(f"{key}={value}: the planner has no formula for it; {remedy}")
    if wrong:
        raise BadInput("\n".join(wrong))


class Setup:
    """The groups of a configuration, as they are, and what follows from several of their keys.

    Attributes:
        config: The whole configuration.
        passes: Of the job.
        data, trainer, model, actor, rollout, fsdp: Groups of the configuration; ``fsdp`` is the actor's.
        ranks, rollout_gpus: GPUs that train, and GPUs that only generate.
        replica_gpus: GPUs of one of vLLM's replicas.
        shards, ulysses: Ranks over which states are sharded, and over which a sequence is spread.
        longest, sequences: Tokens of the longest prompt with the longest response; responses of one step.
        update_tokens, log_prob_tokens: Most tokens of a micro-batch on one GPU.
        mask_width: Keys in the attention mask of a query; None: flash-attn, which forms no mask.
        master_bytes, compute_bytes, reduce_bytes, vllm_bytes: Of one element.
        reference_bytes: Of one element of the reference model.
        old_share: 1 if the actor computes the log-probs of the old policy, 0 if they are vLLM's.
        reference_share: Share of the steps in which the reference model computes log-probs; None without one.
        weight_copies: Of verl, for log-probs of the weights at the beginning of the step: those, and the newest.
    """

    def __init__(self, config: DictConfig, job: Job) -> None:
        self.config, everything = config, config.actor_rollout_ref
        self.data, self.trainer = config.data, config.trainer
        self.model, self.actor, self.rollout = everything.model, everything.actor, everything.rollout
        actor, rollout, trainer = self.actor, self.rollout, self.trainer
        self.fsdp = fsdp = actor.fsdp_config

        separate = asynchronous_mode(config) == "separate_async"
        self.ranks = trainer.nnodes * trainer.n_gpus_per_node
        self.rollout_gpus = rollout.nnodes * rollout.n_gpus_per_node if separate else 0
        self.replica_gpus = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
        self.shards = fsdp.fsdp_size if 0 < fsdp.fsdp_size < self.ranks else self.ranks
        self.vllm_sleeps = rollout.free_cache_engine and rollout.get("enable_sleep_mode", True)

        self.longest = self.data.max_prompt_length + self.data.max_response_length
        self.sequences = self.data.train_batch_size * rollout.n
        self.ulysses = ulysses(config)
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
        self.entropy_in_update = actor.calculate_entropy or actor.entropy_coeff != 0

        precision = fsdp.get("mixed_precision") or {}
        self.master_bytes = ELEMENT_BYTES[fsdp.model_dtype or "fp32"]
        self.compute_bytes = ELEMENT_BYTES[precision.get("param_dtype") or "bf16"]
        self.reduce_bytes = ELEMENT_BYTES[precision.get("reduce_dtype") or "fp32"]
        self.vllm_bytes = ELEMENT_BYTES[rollout.dtype]
        self.reference_bytes = ELEMENT_BYTES[everything.ref.fsdp_config.model_dtype or "bf16"]

        passes = self.passes = job.passes(config)
        measured = 1 / trainer.test_freq if passes.reference_at_validations and trainer.test_freq > 0 else 0.0
        self.reference_share = None
        if config.algorithm.use_kl_in_reward or actor.use_kl_loss:
            self.reference_share = 1.0
        elif passes.reference_at_validations:
            self.reference_share = measured
        correction = config.algorithm.get("rollout_correction") or {}
        self.old_share = 0.0 if passes.old_of_rollout or correction.get("bypass_mode") else 1.0
        self.weight_copies = 2 if separate and passes.keeps_old_weights else 0
