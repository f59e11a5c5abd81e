"""The prediction for one configuration: memory of every phase, what cannot run, as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from omegaconf import DictConfig

from recipe.runner.launch.checks import batch_problems, head_problems, length_problems
from recipe.runner.launch.job import Job
from recipe.runner.plan.memory import GIB, PHASES, Memory, predict
from recipe.runner.plan.model import ModelShape, read_architecture
from recipe.runner.plan.setup import Hardware, Setup, refuse_uncovered
from recipe.runner.verl_patches import server_slots

_TITLES: Final = ("rollout", "log-probs", "update", "optimizer", "save", "to vLLM")
_MODEL, _ACTOR, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
_FEWER_TOKENS: Final = (
    f"lower {_ACTOR}.ppo_max_token_len_per_gpu (with use_dynamic_bsz=false: ppo_micro_batch_size_per_gpu)"
)
#: What makes an item of the memory smaller.
_REMEDIES: Final = {
    **dict.fromkeys(("activations of a layer", "logits", "entropy"), _FEWER_TOKENS),
    "activations kept": _FEWER_TOKENS,
    "unreduced gradients": f"set {_ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=false",
    "vLLM asleep": f"set {_ROLLOUT}.free_cache_engine=true",
    "vLLM weights": f"raise {_ROLLOUT}.tensor_model_parallel_size",
    "vLLM keys and values": f"lower {_ROLLOUT}.gpu_memory_utilization",
    "vLLM the rest": f"lower {_ROLLOUT}.max_num_batched_tokens or max_num_seqs",
    "bucket of weights": f"lower {_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
}


@dataclass(frozen=True)
class Plan:
    """A prediction."""

    model: ModelShape
    setup: Setup
    hardware: Hardware
    memory: Memory
    problems: list[str]

    def lines(self) -> list[str]:
        """The prediction for people, without the problems."""
        return [*self._job(), "", *self._memory()]

    def _job(self) -> Iterator[str]:
        model, setup, data, trainer = self.model, self.setup, self.setup.data, self.setup.trainer
        kv_kib = model.kv_bytes_per_token(setup.vllm_bytes) / 1024
        updates = data.train_batch_size // setup.actor.ppo_mini_batch_size * setup.actor.ppo_epochs
        generate = f" to train, {setup.rollout_gpus} to generate" if setup.rollout_gpus else ""
        yield f"{model.name}: {model.parameters / 1e9:.2f}e9 parameters, {kv_kib:.0f} KiB of keys and values per token"
        yield (
            f"{trainer.nnodes} x {trainer.n_gpus_per_node} GPUs of {self.hardware.gpu_gb:g} GiB{generate}; "
            f"{data.train_batch_size} prompts x {setup.rollout.n} responses a step, {updates} updates, "
            f"at most {data.max_prompt_length} + {data.max_response_length} tokens, "
            f"{setup.update_tokens} tokens a GPU and micro-batch"
        )

    def _memory(self) -> Iterator[str]:
        memory, setup = self.memory, self.setup
        yield f"{'GiB per GPU':28}" + "".join(f"{title:>11}" for title in _TITLES)
        for name in dict.fromkeys(name for phase in PHASES for name in memory.items[phase]):
            values = [memory.items[phase].get(name, 0.0) / GIB for phase in PHASES]
            if max(values) >= 0.005:
                yield f"{name:28}" + "".join(f"{value:11.2f}" if value >= 0.005 else " " * 11 for value in values)
        totals = [memory.total(phase) / GIB for phase in PHASES]
        yield f"{'total':28}" + "".join(f"{total:11.2f}" for total in totals)
        fits = ("yes" if total <= self.hardware.gpu_gb else "NO" for total in totals)
        yield f"{'fits':28}" + "".join(f"{answer:>11}" for answer in fits)
        yield f"host memory for offloaded states, pinned: {memory.host_bytes / GIB:.0f} GiB per node"
        yield (
            f"KV cache of each copy of the model on {setup.copy_gpus} GPUs: {memory.kv_tokens} tokens, "
            f"{memory.kv_tokens // setup.longest} sequences of full length; "
            f"{memory.kv_tokens // setup.rollout.max_num_seqs} for each of max_num_seqs={setup.rollout.max_num_seqs}"
        )
        requests, servers = server_slots.requests_per_server(setup.config), server_slots.servers(setup.config)
        yield f"requests at once: {requests} to each of {servers} vLLM server(s)"


def plan(config: DictConfig, job: Job, hardware: Hardware | None = None, model_config: str | None = None) -> Plan:
    """The prediction for a composed configuration of a job, and what cannot run.

    Raises:
        BadInput: for a setting without a formula, or a model that is not known.
    """
    refuse_uncovered(config)
    hardware = hardware or Hardware()
    model = ModelShape.from_config(*read_architecture(config.actor_rollout_ref.model.path, model_config))
    setup = Setup(config, job)
    memory = predict(model, setup, hardware)
    problems = [
        *batch_problems(config),
        *length_problems(config, model.max_positions),
        *head_problems(config, model.heads),
        *memory_problems(memory, setup, hardware),
    ]
    return Plan(model, setup, hardware, memory, problems)


def memory_problems(memory: Memory, setup: Setup, hardware: Hardware) -> Iterator[str]:
    """A sentence for every phase that needs more memory than a GPU has: its largest item, and what lowers that."""
    share = f"{_ROLLOUT}.gpu_memory_utilization={setup.rollout.gpu_memory_utilization:g}"
    if memory.kv_tokens < setup.longest:
        yield (
            f"{share} leaves room for {memory.kv_tokens} tokens of keys and values, less than one sequence of "
            f"{setup.longest}: raise it, or {_ROLLOUT}.tensor_model_parallel_size"
        )
    if memory.host_bytes > hardware.host_gb * GIB:
        yield (
            f"a node pins {memory.host_bytes / GIB:.0f} GiB of host memory of host_gb={hardware.host_gb:g}: set "
            f"{_ACTOR}.fsdp_config.param_offload=false or optimizer_offload=false, or raise host_gb"
        )
    for phase, title in zip(PHASES, _TITLES, strict=True):
        if (total := memory.total(phase)) <= hardware.gpu_gb * GIB:
            continue
        largest, value = max(memory.items[phase].items(), key=lambda item: item[1])
        remedy = _REMEDIES.get(largest, "raise trainer.n_gpus_per_node or trainer.nnodes")
        if largest == "activations kept" and not setup.model.enable_gradient_checkpointing:
            remedy += f"; less is kept with {_MODEL}.enable_gradient_checkpointing=true"
        if remedy.startswith(_FEWER_TOKENS) and setup.update_tokens * setup.ulysses <= setup.longest:
            # A sequence is never split, so the budget cannot be lower; its parts can be.
            remedy = remedy.replace(_FEWER_TOKENS, f"raise {_ACTOR}.ulysses_sequence_parallel_size")
        yield (
            f"{title}: {f'with {share} ' if phase == 'rollout' else ''}a GPU needs {total / GIB:.1f} GiB of "
            f"{hardware.gpu_gb:g}, most of it for {largest} ({value / GIB:.1f}): {remedy}"
        )
