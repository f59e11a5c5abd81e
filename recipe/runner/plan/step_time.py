"""Seconds of a step and hours of a run, from peak rates and guesses: for planning, not for comparing algorithms."""

from __future__ import annotations

import functools
import heapq
import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipe.runner.launch.server_slots import asynchronous_mode
from recipe.runner.plan.memory import Memory
from recipe.runner.plan.model import ModelShape
from recipe.runner.plan.packs import simulated
from recipe.runner.plan.setup import Hardware, Setup

Floats = NDArray[np.floating[Any]]
#: Standard deviation of the logarithm of a length, over prompts and within one (a guess).
_SPREAD: Final = 0.5
#: Share of its rate up to which vLLM's front end keeps up: closer to it, tokens wait (a guess).
_FRONT_END: Final = 0.7
#: Share of the update's time that Liger's kernels leave: unconfirmed.
_LIGER: Final = 0.9


@functools.lru_cache
def response_lengths(prompts: int, n: int, mean: float, longest: int) -> Floats:
    """Simulated lengths in tokens, prompt by prompt: ``min(longest, a exp(u + v))`` with a normal u of each prompt and
    v of each response, and the a that gives the mean."""
    random = np.random.default_rng(0)
    drawn = np.exp(random.normal(0, _SPREAD, (prompts, 1)) + random.normal(0, _SPREAD, (prompts, n))).ravel()
    low, high = 0.0, longest / float(drawn.min())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(longest, middle * drawn).mean() < mean else (low, middle)
    return np.minimum(longest, high * drawn)


def sampled(setup: Setup, hardware: Hardware) -> tuple[float, Floats]:
    """Mean tokens of a prompt, and the simulated lengths of a step's responses."""
    longest = setup.data.max_response_length
    mean = float(min(hardware.mean_response or setup.passes.mean_response or longest / 2, longest))
    prompt = hardware.mean_prompt or setup.data.max_prompt_length / 8
    return prompt, response_lengths(setup.data.train_batch_size, setup.rollout.n, mean, longest)


@functools.lru_cache(maxsize=512)
def _schedule(lengths: bytes, slots: int) -> tuple[float, Floats]:
    """When the last response begins, if a slot is refilled as soon as it is free, and when those then running end."""
    ends, begin = [0.0] * slots, 0.0
    for length in np.frombuffer(lengths).tolist():
        begin = heapq.heappop(ends)
        heapq.heappush(ends, begin + length)
    return begin, np.sort(ends)


def generation(
    model: ModelShape, setup: Setup, hardware: Hardware, memory: Memory, lengths_B: Floats, *, tail: bool
) -> dict[str, float]:
    """Seconds to generate these responses, and how many a replica decodes together.

    A response that is being generated has ``prompt + E[L^2] / 2 E[L]`` tokens on average. A replica decodes ``c =
    min(its sequences, max_num_seqs, what the KV cache holds of such)`` together. A decoding step reads the weights and
    c contexts, or takes as long as the arithmetic if that is longer; then ``decode_overhead_ms`` and, with tensor
    parallelism, two all-reduces a layer; and no less than its front end needs for c tokens at 0.7 of its rate. Until
    the last response begins, all c are busy; then fewer, unless the mode goes on with the next batch (no ``tail``).
    """
    prompt, _ = sampled(setup, hardware)
    replicas = max(1, (setup.rollout_gpus or setup.ranks) // setup.replica_gpus)
    context = prompt + float((lengths_B**2).sum() / lengths_B.sum()) / 2
    fit = memory.kv_tokens / context
    slots = max(1, math.floor(min(len(lengths_B) / replicas, setup.rollout.max_num_seqs, fit)))
    bandwidth = setup.replica_gpus * hardware.gpu_tb_per_s * 1e12 * hardware.decode_efficiency
    rate = setup.replica_gpus * hardware.gpu_tflops * 1e12 * hardware.mfu
    weights, cached = model.parameters * setup.vllm_bytes, context * model.kv_bytes_per_token(setup.vllm_bytes)
    exchanges = 2 * model.layers * (setup.rollout.tensor_model_parallel_size > 1)
    fixed = hardware.decode_overhead_ms / 1e3 + exchanges * hardware.allreduce_us / 1e6

    def step_s(active: Any) -> Any:
        decoding = np.maximum((weights + active * cached) / bandwidth, active * model.forward_flops(1, 0) / rate)
        return np.maximum(decoding + fixed, active / hardware.front_end / _FRONT_END)

    seconds = float(lengths_B.sum() / replicas / slots * step_s(slots))
    if tail:
        schedules = [_schedule(lengths_B[replica::replicas].tobytes(), slots) for replica in range(replicas)]
        fewer_S = step_s(slots - np.arange(slots))
        seconds = max(begin * fewer_S[0] + np.diff(ends, prepend=begin) @ fewer_S for begin, ends in schedules)
    # A group shares the blocks of its prompt.
    prefill = model.forward_flops(len(lengths_B) / setup.rollout.n / replicas * prompt, 0.0) / rate
    front_end = slots / float(step_s(slots)) / hardware.front_end
    return {"generation": float(prefill + seconds), "concurrent": slots, "fit": fit, "front_end": front_end}


def training(model: ModelShape, setup: Setup, hardware: Hardware, tokens_B: Floats) -> dict[str, float]:
    """Seconds of log-probabilities and of the update.

    With F the seconds of one forward pass over the step's tokens (:meth:`ModelShape.forward_flops`) on GPUs of
    ``gpu_tflops * mfu``: F for the reference at the share of steps that need it, and F for the old policy
    (unless its log-probabilities are vLLM's); an update takes 3 F (forward, and twice that for
    backward), 4 F with gradient checkpointing, times the epochs. F is divided by the fill of the packs where they are
    padded, since all ranks go through as many. Else it is multiplied by what the slowest rank has over the mean.

    Between nodes, a pack's weights are gathered in each forward and backward pass, and its gradients reduced, by rings
    that carry nearly all of them through every node. A pass takes as long as the longer of arithmetic and network.
    Attention synchronises, so without ``forward_prefetch`` only the rest of a layer (3/4) hides the next one's weights.
    With ``fsdp_size`` of a node, only the gradients' all-reduce goes between nodes.
    """
    speed = setup.ranks * hardware.gpu_tflops * 1e12 * hardware.mfu
    groups = max(1, setup.ranks // setup.ulysses)
    budget, mini_batch = setup.update_tokens * setup.ulysses, setup.actor.ppo_mini_batch_size * setup.rollout.n
    fill, slowest = simulated(tuple(tokens_B.astype(int).tolist()), mini_batch, groups, budget)
    fill, slowest = hardware.fill or fill, hardware.slowest or slowest
    even = model.forward_flops(float(tokens_B.sum()), float((tokens_B**2).sum())) / speed
    packs = float(tokens_B.sum()) / (setup.ranks * setup.update_tokens * fill)
    carried = packs * model.parameters / (hardware.network_gb_per_s * 1e9)  # seconds for each byte of a parameter
    gather, reduce, nodes = carried * setup.compute_bytes, carried * setup.reduce_bytes, setup.trainer.nnodes
    if nodes == 1 or setup.shards < setup.ranks:
        gather, reduce = 0.0, 2 * reduce * (nodes - 1) / nodes

    def forward(fill: float) -> tuple[float, float]:
        work = even / fill if setup.fsdp.pad_to_length else even * slowest
        exposed = 0 if setup.fsdp.forward_prefetch else work / 4
        return work, exposed + max(work - exposed, gather)

    work, own = forward(fill)
    backward = max((3 if setup.model.enable_gradient_checkpointing else 2) * work, gather + reduce)
    update = (own + backward) * setup.actor.ppo_epochs * (_LIGER if setup.model.use_liger else 1)
    log_probs = forward(hardware.fill_log_probs or fill)[1] * (setup.old_share + (setup.reference_share or 0))
    return {"log_probs": log_probs, "update": update, "fill": fill, "slowest": slowest}


def step_time(model: ModelShape, setup: Setup, hardware: Hardware, memory: Memory) -> dict[str, float]:
    """Seconds of a step, a validation and a save, hours of the run, and what they follow from.

    ``rest``: rewards, driver, vLLM's sleep, new weights (``driver_ms``, ``sync_s``), and offloaded states, which come
    and go for log-probabilities and update. In ``mode=separate_async`` the slower of generation and training counts.
    """
    prompt, lengths_B = sampled(setup, hardware)
    trainer, tail = setup.trainer, asynchronous_mode(setup.config) is None
    time = generation(model, setup, hardware, memory, lengths_B, tail=tail)
    time |= training(model, setup, hardware, lengths_B + prompt)
    moved = 4 * (setup.fsdp.param_offload + setup.fsdp.optimizer_offload)
    moved *= model.parameters * setup.master_bytes / setup.shards
    rest = hardware.sync_s * model.parameters / 1e9 + hardware.driver_ms / 1e3 * setup.sequences
    rest += moved / (hardware.host_gb_per_s * 1e9)
    trained = time["log_probs"] + time["update"]
    both = max(time["generation"], trained) if setup.rollout_gpus else time["generation"] + trained

    steps = trainer.total_training_steps or 0
    validations, saves = (-(-steps // every) if every > 0 else 0 for every in (trainer.test_freq, trainer.save_freq))
    validations += trainer.val_before_train
    answers_B = np.resize(lengths_B, max(1, int(setup.rollout.val_kwargs.n * hardware.val_prompts)))
    validation = generation(model, setup, hardware, memory, answers_B, tail=True)["generation"]
    save_bytes = 3 * setup.master_bytes * model.parameters  # weights and two moments
    save = save_bytes / (hardware.disk_gb_per_s * 1e9)
    seconds = steps * (both + rest) + validations * validation + saves * save
    starts = max(1, math.ceil(seconds / 3600 / hardware.job_hours))
    hours = (seconds + starts * hardware.startup_s) / 3600
    return time | {
        "rest": rest,
        "total": both + rest,
        "tokens": float((lengths_B + prompt).sum()),
        "mean_prompt": prompt,
        "mean_response": float(lengths_B.mean()),
        "validation": validation,
        "validations": validations,
        "save": save,
        "save_bytes": save_bytes,
        "saves": saves,
        "starts": starts,
        "hours": hours,
        "gpu_hours": hours * (setup.ranks + setup.rollout_gpus),
    }
