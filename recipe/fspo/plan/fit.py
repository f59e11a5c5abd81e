"""What cannot fit, each with the setting to change and the value that would fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from recipe.fspo.plan.memory import GIB, Memory, predict
from recipe.fspo.plan.model import ModelShape
from recipe.fspo.plan.setup import Hardware, Setup

#: One change: the key, its value as text, and the settings with it.
Change = tuple[str, str, Setup]
Check = Callable[[Setup], bool]

_ACTOR = "actor_rollout_ref.actor"
_UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"
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
    found = []
    memory = predict(model, setup, hardware)

    def remedied(changes: Iterator[Change], fits: Check) -> str:
        for key, value, changed in changes:
            if fits(changed):
                return f"set {key}={value}"
        return f"no single setting makes it fit on up to {_LARGEST_CLUSTER} nodes: take a smaller model or larger GPUs"

    if not _rollout_fits(memory, hardware):
        found.append(
            f"{_UTILIZATION}={setup.gpu_memory_utilization:g}: while vLLM generates, {_gib(memory.total('rollout'))} "
            f"are needed of {hardware.gpu_gb:g} GiB: "
            + remedied(_rollout_changes(model, setup, hardware), lambda s: _generates(model, s, hardware))
        )
    elif memory.kv_tokens < setup.longest:
        found.append(
            f"{_UTILIZATION}={setup.gpu_memory_utilization:g} leaves room for {memory.kv_tokens} tokens of keys and "
            f"values, less than one sequence of {setup.longest}: "
            + remedied(_rollout_changes(model, setup, hardware), lambda s: _generates(model, s, hardware))
        )
    for phase, name in _PHASE_NAMES.items():
        if memory.total(phase) > hardware.gpu_gb * GIB:
            found.append(
                f"{name} needs {_gib(memory.total(phase))} of {hardware.gpu_gb:g} GiB "
                f"({_largest(memory.items[phase])}): "
                + remedied(_training_changes(model, setup), lambda s: _trains(model, s, hardware))
            )
    return list(dict.fromkeys(found))


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"


def _largest(items: dict[str, float]) -> str:
    first = sorted(items.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {value / GIB:.1f}" for name, value in first)


def _rollout_fits(memory: Memory, hardware: Hardware) -> bool:
    # vLLM's weights may exceed its share: then there is no cache, which is another problem.
    return memory.total("rollout") <= hardware.gpu_gb * GIB


def _generates(model: ModelShape, setup: Setup, hardware: Hardware) -> bool:
    memory = predict(model, setup, hardware)
    return _rollout_fits(memory, hardware) and memory.kv_tokens >= setup.longest


def _trains(model: ModelShape, setup: Setup, hardware: Hardware) -> bool:
    memory = predict(model, setup, hardware)
    return all(memory.total(phase) <= hardware.gpu_gb * GIB for phase in _PHASE_NAMES)


def _rollout_changes(model: ModelShape, setup: Setup, hardware: Hardware) -> Iterator[Change]:
    beside = predict(model, dataclasses.replace(setup, gpu_memory_utilization=0.0), hardware)
    trainer = beside.total("rollout") - sum(
        beside.items["rollout"][key] for key in beside.items["rollout"] if "vLLM" in key
    )
    largest = math.floor(20 * (1 - trainer / (hardware.gpu_gb * GIB)))
    steps = [step / 20 for step in range(1, largest + 1)]
    # The nearest value: upwards where the cache is too small, downwards where the share is too large.
    for share in sorted(steps, key=lambda share: abs(share - setup.gpu_memory_utilization)):
        yield _UTILIZATION, f"{share:g}", dataclasses.replace(setup, gpu_memory_utilization=share)
    fsdp = f"{_ACTOR}.fsdp_config"
    yield f"{fsdp}.optimizer_offload", "true", dataclasses.replace(setup, optimizer_offload=True)
    both = dataclasses.replace(setup, optimizer_offload=True, param_offload=True)
    yield f"{fsdp}.param_offload", f"true {fsdp}.optimizer_offload=true", both
    for size in (2, 4, 8):
        pipeline = setup.replica_gpus // setup.tensor_parallel
        if size > setup.tensor_parallel and model.heads % size == 0 and setup.generating % (size * pipeline) == 0:
            yield (
                "actor_rollout_ref.rollout.tensor_model_parallel_size",
                str(size),
                dataclasses.replace(setup, tensor_parallel=size, replica_gpus=size * pipeline),
            )
    yield from _more_gpus(setup)


def _training_changes(model: ModelShape, setup: Setup) -> Iterator[Change]:
    if not setup.vllm_sleeps:
        yield (
            "actor_rollout_ref.rollout.free_cache_engine",
            "true ++actor_rollout_ref.rollout.enable_sleep_mode=true",
            dataclasses.replace(setup, vllm_sleeps=True),
        )
    if not setup.gradient_checkpointing:
        yield (
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            "true",
            dataclasses.replace(setup, gradient_checkpointing=True),
        )
    if setup.dynamic:
        smallest = -(-setup.longest // setup.ulysses)
        for tokens in range((setup.update_tokens - 1) // 1024 * 1024, smallest - 1, -1024):
            yield (
                f"{_ACTOR}.ppo_max_token_len_per_gpu",
                str(tokens),
                dataclasses.replace(setup, update_tokens=tokens, log_prob_tokens=tokens),
            )
    else:
        per_rank = setup.mini_prompts * setup.n // setup.ranks
        for micro in range(setup.micro_sequences - 1, 0, -1):
            if per_rank % micro == 0:
                tokens = -(-micro * setup.longest // setup.ulysses)
                yield (
                    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
                    str(micro),
                    dataclasses.replace(setup, micro_sequences=micro, log_prob_tokens=tokens),
                )
    if not setup.entropy_chunk:
        yield (
            f"{_ACTOR}.entropy_from_logits_with_chunking",
            "true",
            dataclasses.replace(setup, entropy_chunk=2048),
        )
    yield from _more_gpus(setup)
    if not setup.offload_policy:
        yield (
            f"{_ACTOR}.fsdp_config.offload_policy",
            "true",
            dataclasses.replace(setup, offload_policy=True, param_offload=False, optimizer_offload=False),
        )


def _whole_replicas(setup: Setup, ranks: int) -> bool:
    return setup.rollout_gpus > 0 or ranks % setup.replica_gpus == 0


def _more_gpus(setup: Setup) -> Iterator[Change]:
    """More GPUs in a node, up to 8, then more nodes; only numbers that the mini-batch divides over."""
    sequences = setup.mini_prompts * setup.n
    grown = setup.shards == setup.ranks
    for gpus in (2, 4, 8):
        ranks = setup.nodes * gpus
        if gpus > setup.gpus and sequences % ranks == 0 and _whole_replicas(setup, ranks):
            changed = dataclasses.replace(setup, gpus=gpus, shards=ranks if grown else setup.shards)
            yield "trainer.n_gpus_per_node", str(gpus), changed
    for nodes in range(setup.nodes + 1, _LARGEST_CLUSTER + 1):
        ranks = nodes * setup.gpus
        if sequences % ranks == 0 and _whole_replicas(setup, ranks):
            yield (
                "trainer.nnodes",
                str(nodes),
                dataclasses.replace(setup, nodes=nodes, shards=ranks if grown else setup.shards),
            )
