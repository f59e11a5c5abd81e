"""The prediction for one configuration: memory of every phase, an estimated step time, what cannot run, as text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch import server_slots
from recipe.runner.launch.checks import batch_problems, head_problems, length_problems
from recipe.runner.plan.memory import GIB, PHASES, Memory, predict
from recipe.runner.plan.model import ModelShape, read_architecture
from recipe.runner.plan.setup import Hardware, Setup

_TITLES: Final = ("rollout", "log-probs", "update", "optimizer", "to vLLM")
_MODEL, _ACTOR, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
_MORE_GPUS: Final = "raise trainer.n_gpus_per_node or trainer.nnodes"
_FEWER_TOKENS: Final = (
    f"lower {_ACTOR}.ppo_max_token_len_per_gpu (with use_dynamic_bsz=false: ppo_micro_batch_size_per_gpu)"
)
#: What makes an item of the memory smaller.
_REMEDIES: Final = {
    "weights (shard)": _MORE_GPUS,
    "gradients (shard)": _MORE_GPUS,
    "Adam moments (shard)": _MORE_GPUS,
    "Adam working copy": _MORE_GPUS,
    "unreduced gradients": f"set {_ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=false",
    "activations kept": f"{_FEWER_TOKENS}; less is kept with {_MODEL}.enable_gradient_checkpointing=true",
    "activations of a layer": _FEWER_TOKENS,
    "logits": _FEWER_TOKENS,
    "entropy": f"{_FEWER_TOKENS}; it is smaller with {_ACTOR}.entropy_from_logits_with_chunking=true",
    "vLLM asleep": f"set {_ROLLOUT}.free_cache_engine=true",
    "vLLM weights": f"raise {_ROLLOUT}.tensor_model_parallel_size",
    "vLLM keys and values": f"lower {_ROLLOUT}.gpu_memory_utilization",
    "vLLM the rest": f"lower {_ROLLOUT}.max_num_batched_tokens or max_num_seqs",
    "bucket of weights": f"lower {_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
}


@dataclass(frozen=True)
class Plan:
    """A prediction. ``time``: seconds of a step by part, their ``total``, and what they follow from."""

    model: ModelShape
    setup: Setup
    hardware: Hardware
    memory: Memory
    time: dict[str, float]
    problems: list[str]

    def lines(self) -> list[str]:
        """The prediction for people, without the problems."""
        return [*self._job(), "", *self._memory(), "", *self._time()]

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
        yield f"host memory for offloaded states: {memory.host_bytes / GIB:.0f} GiB per node"
        yield (
            f"KV cache per replica of {setup.replica_gpus} GPUs: {memory.kv_tokens} tokens, "
            f"{memory.kv_tokens // setup.longest} sequences of full length"
        )
        requests, servers = server_slots.requests_per_server(setup.config), server_slots.servers(setup.config)
        yield f"requests at once: {requests} to each of {servers} vLLM server(s)"

    def _time(self) -> Iterator[str]:
        time, hardware = self.time, self.hardware
        larger, plus = ("the larger of ", "and") if self.setup.rollout_gpus else ("", "+")
        yield (
            f"step time, estimated: {time['total']:.0f} s = {larger}generation {time['generation']:.0f} {plus} "
            f"log-probs {time['log_probs']:.0f} + update {time['update']:.0f}; "
            f"{time['tokens'] / time['total']:.0f} tokens/s"
        )
        yield (
            f"  assumed: mean lengths {time['mean_prompt']:g} + {time['mean_response']:g}, mfu {hardware.mfu:g}; "
            f"decoding at {hardware.decode_efficiency:g} of the bandwidth, {time['concurrent']} sequences in a replica"
        )
        yield "  not counted: rewards, validation, offloading, start-up"
        if steps := self.setup.trainer.total_training_steps:
            yield f"the run: {steps} steps take {steps * time['total'] / 3600:.0f} h"


def plan(config: DictConfig, hardware: Hardware | None = None, model_config: str | None = None) -> Plan:
    """The prediction for a composed configuration, and what cannot run.

    Raises:
        BadInput: for a setting without a formula, or a model that is not known.
    """
    setup, hardware = Setup(config), hardware or Hardware()
    model = ModelShape.from_config(*read_architecture(config.actor_rollout_ref.model.path, model_config))
    memory = predict(model, setup, hardware)
    problems = [
        *batch_problems(config),
        *length_problems(config, model.max_positions),
        *head_problems(config, model.heads),
        *memory_problems(memory, setup, hardware),
    ]
    return Plan(model, setup, hardware, memory, step_time(model, setup, hardware, memory), problems)


def memory_problems(memory: Memory, setup: Setup, hardware: Hardware) -> Iterator[str]:
    """A sentence for every phase that needs more memory than a GPU has: its largest item, and what lowers that."""
    share = f"{_ROLLOUT}.gpu_memory_utilization={setup.rollout.gpu_memory_utilization:g}"
    if memory.kv_tokens < setup.longest:
        yield (
            f"{share} leaves room for {memory.kv_tokens} tokens of keys and values, less than one sequence of "
            f"{setup.longest}: raise it, or {_ROLLOUT}.tensor_model_parallel_size"
        )
    for phase, title in zip(PHASES, _TITLES, strict=True):
        if (total := memory.total(phase)) <= hardware.gpu_gb * GIB:
            continue
        largest, value = max(memory.items[phase].items(), key=lambda item: item[1])
        remedy = _REMEDIES.get(largest, "take a smaller model or larger GPUs")
        yield (
            f"{title}: {f'with {share} ' if phase == 'rollout' else ''}a GPU needs {total / GIB:.1f} GiB of "
            f"{hardware.gpu_gb:g}, most of it for {largest} ({value / GIB:.1f}): {remedy}"
        )


def step_time(model: ModelShape, setup: Setup, hardware: Hardware, memory: Memory) -> dict[str, float]:
    """Seconds of one step, from peak rates and guessed efficiencies: for planning, not for comparing algorithms.

    With F the operations of one forward pass over the step's tokens (:meth:`ModelShape.forward_flops`), on N GPUs of
    ``gpu_tflops * mfu``: log-probs take F for the old policy, and F for the reference at the share of steps that need
    it; an update 3 F (forward, and twice that for backward), 4 F with gradient checkpointing, times the epochs. In sums
    of squares lengths are uniform between 0 and twice the mean: E[L^2] = 4/3 mean^2.

    A replica decodes ``c = min(its sequences, max_num_seqs, what the KV cache holds)`` sequences together. A decoding
    step reads the weights and the keys and values of c contexts at their mean length, or takes as long as the
    arithmetic if that is longer, and ``decode_overhead_ms``. In ``mode=sync`` the last sequences decode alone until the
    longest has the maximum of tokens. In ``mode=separate_async`` the slower of generation and training is the time.
    """
    prompt = hardware.mean_prompt or setup.data.max_prompt_length / 8
    longest = setup.data.max_response_length
    # A job of this machinery need not have this setting of the method.
    usual = OmegaConf.select(setup.config, "fspo.reference_length")
    response = min(hardware.mean_response or usual or longest / 2, longest)
    tokens = setup.sequences * (prompt + response)
    speed = hardware.gpu_tflops * 1e12 * hardware.mfu  # operations per second of one GPU
    forward = model.forward_flops(tokens, tokens * (prompt + response) * 4 / 3) / (setup.ranks * speed)
    passes = (4 if setup.model.enable_gradient_checkpointing else 3) * setup.actor.ppo_epochs

    replicas = (setup.rollout_gpus or setup.ranks) / setup.replica_gpus
    # Not the mean context: a sequence's blocks stay until it ends, and vLLM preempts when they run out.
    fits = memory.kv_tokens / (prompt + response)
    concurrent = max(1, math.floor(min(setup.sequences / replicas, setup.rollout.max_num_seqs, fits)))
    bandwidth = setup.replica_gpus * hardware.gpu_tb_per_s * 1e12 * hardware.decode_efficiency
    rate, overhead = setup.replica_gpus * speed, hardware.decode_overhead_ms / 1e3
    weights = model.parameters * setup.vllm_bytes / bandwidth
    contexts = concurrent * (prompt + response / 2) * model.kv_bytes_per_token(setup.vllm_bytes) / bandwidth
    steps = setup.sequences / replicas * response / concurrent
    tail = 0.0 if server_slots.asynchronous_mode(setup.config) else max(0.0, longest - steps)
    # A group shares the blocks of its prompt.
    prefill = model.forward_flops(setup.data.train_batch_size / replicas * prompt, 0.0) / rate
    decoding = max(weights + contexts, model.forward_flops(concurrent, 0.0) / rate) + overhead
    generation = prefill + steps * decoding + tail * (weights + overhead)

    log_probs, update = forward * (1 + (setup.reference_share or 0)), forward * passes
    training = log_probs + update
    return {
        "generation": generation,
        "log_probs": log_probs,
        "update": update,
        "total": max(generation, training) if setup.rollout_gpus else generation + training,
        "tokens": tokens,
        "concurrent": concurrent,
        "mean_prompt": prompt,
        "mean_response": response,
    }
