"""What cannot fit, each with the setting to change and the value that would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from recipe.runner.plan.memory import GIB, Memory, predict
from recipe.runner.plan.model import ModelShape
from recipe.runner.plan.setup import Hardware, Setup

#: One change: the key, its value as text, and the settings with it.
Change = tuple[str, str, Setup]

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_UTILIZATION = f"{_ROLLOUT}.gpu_memory_utilization"
_LARGEST_CLUSTER = 64  # nodes; more is not a remedy that anybody wants to hear
#: verl's V1 trainer calls them so in its timings.
_PHASE_NAMES = {
    "log_probs": "the log-probs",
    "update": "the update",
    "optimizer": "the optimizer's step",
    "sync": "the weight synchronisation",
}


def memory_problems(model: ModelShape, setup: Setup, hardware: Hardware) -> list[str]:
    """A sentence for every phase that needs more memory than a GPU has; empty if the run fits."""
    memory = predict(model, setup, hardware)
    found = []
    share = f"{_UTILIZATION}={setup.gpu_memory_utilization:g}"
    if not _fits(memory, hardware, "rollout"):
        needed = f"while vLLM generates, {_gib(memory.total('rollout'))} are needed of {hardware.gpu_gb:g} GiB"
        found.append(f"{share}: {needed}: {_remedy(model, setup, hardware)}")
    elif memory.kv_tokens < setup.longest:
        room = (
            f"leaves room for {memory.kv_tokens} tokens of keys and values, less than one sequence of {setup.longest}"
        )
        found.append(f"{share} {room}: {_remedy(model, setup, hardware)}")
    for phase, name in _PHASE_NAMES.items():
        if not _fits(memory, hardware, phase):
            needed = f"{name} needs {_gib(memory.total(phase))} of {hardware.gpu_gb:g} GiB"
            found.append(
                f"{needed} ({_largest(memory.items[phase])}): {_remedy(model, setup, hardware, training=True)}"
            )
    return found


def _remedy(model: ModelShape, setup: Setup, hardware: Hardware, training: bool = False) -> str:
    for key, value, changed in _training_changes(setup) if training else _rollout_changes(model, setup, hardware):
        memory = predict(model, changed, hardware)
        phases = _PHASE_NAMES if training else ("rollout",)
        if _fits(memory, hardware, *phases) and (training or memory.kv_tokens >= changed.longest):
            return f"set {key}={value}"
    return f"no single setting makes it fit on up to {_LARGEST_CLUSTER} nodes: take a smaller model or larger GPUs"


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"


def _largest(items: dict[str, float]) -> str:
    first = sorted(items.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {value / GIB:.1f}" for name, value in first)


def _fits(memory: Memory, hardware: Hardware, *phases: str) -> bool:
    # vLLM's weights may exceed its share: then there is no cache, which is another problem.
    return all(memory.total(phase) <= hardware.gpu_gb * GIB for phase in phases)


def _rollout_changes(model: ModelShape, setup: Setup, hardware: Hardware) -> Iterator[Change]:
    beside = predict(model, replace(setup, gpu_memory_utilization=0.0), hardware).items["rollout"]
    trainer = sum(value for item, value in beside.items() if "vLLM" not in item)
    largest = math.floor(20 * (1 - trainer / (hardware.gpu_gb * GIB)))
    steps = [step / 20 for step in range(1, largest + 1)]
    # The nearest value: upwards where the cache is too small, downwards where the share is too large.
    for share in sorted(steps, key=lambda share: abs(share - setup.gpu_memory_utilization)):
        yield _UTILIZATION, f"{share:g}", replace(setup, gpu_memory_utilization=share)
    fsdp = f"{_ACTOR}.fsdp_config"
    yield f"{fsdp}.optimizer_offload", "true", replace(setup, optimizer_offload=True)
    both = replace(setup, optimizer_offload=True, param_offload=True)
    yield f"{fsdp}.param_offload", f"true {fsdp}.optimizer_offload=true", both
    pipeline = setup.replica_gpus // setup.tensor_parallel
    for size in (2, 4, 8):
        if size > setup.tensor_parallel and model.heads % size == 0 and setup.generating % (size * pipeline) == 0:
            changed = replace(setup, tensor_parallel=size, replica_gpus=size * pipeline)
            yield f"{_ROLLOUT}.tensor_model_parallel_size", str(size), changed
    yield from _more_gpus(setup)


def _training_changes(setup: Setup) -> Iterator[Change]:
    if not setup.vllm_sleeps:
        value = f"true ++{_ROLLOUT}.enable_sleep_mode=true"
        yield f"{_ROLLOUT}.free_cache_engine", value, replace(setup, vllm_sleeps=True)
    if not setup.gradient_checkpointing:
        key = "actor_rollout_ref.model.enable_gradient_checkpointing"
        yield key, "true", replace(setup, gradient_checkpointing=True)
    if setup.dynamic:
        smallest = -(-setup.longest // setup.ulysses)
        for tokens in range((setup.update_tokens - 1) // 1024 * 1024, smallest - 1, -1024):
            changed = replace(setup, update_tokens=tokens, log_prob_tokens=tokens)
            yield f"{_ACTOR}.ppo_max_token_len_per_gpu", str(tokens), changed
    else:
        per_rank = setup.mini_prompts * setup.n // setup.ranks
        for micro in range(setup.micro_sequences - 1, 0, -1):
            if per_rank % micro == 0:
                tokens = -(-micro * setup.longest // setup.ulysses)
                changed = replace(setup, micro_sequences=micro, log_prob_tokens=tokens)
                yield f"{_ACTOR}.ppo_micro_batch_size_per_gpu", str(micro), changed
    if not setup.entropy_chunk:
        yield f"{_ACTOR}.entropy_from_logits_with_chunking", "true", replace(setup, entropy_chunk=2048)
    yield from _more_gpus(setup)
    if not setup.offload_policy:
        changed = replace(setup, offload_policy=True, param_offload=False, optimizer_offload=False)
        yield f"{_ACTOR}.fsdp_config.offload_policy", "true", changed


def _more_gpus(setup: Setup) -> Iterator[Change]:
    """More GPUs in a node, up to 8, then more nodes; only numbers that the mini-batch divides over."""
    more = [("trainer.n_gpus_per_node", gpus, setup.nodes, gpus) for gpus in (2, 4, 8) if gpus > setup.gpus]
    more += [("trainer.nnodes", n, n, setup.gpus) for n in range(setup.nodes + 1, _LARGEST_CLUSTER + 1)]
    for key, value, nodes, gpus in more:
        ranks = nodes * gpus
        whole_replicas = setup.rollout_gpus > 0 or ranks % setup.replica_gpus == 0
        if setup.mini_prompts * setup.n % ranks == 0 and whole_replicas:
            shards = ranks if setup.shards == setup.ranks else setup.shards
            yield key, str(value), replace(setup, nodes=nodes, gpus=gpus, shards=shards)
