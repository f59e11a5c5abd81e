"""An estimate of a step's time from peak rates and efficiencies: for planning, not for comparing algorithms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recipe.runner.plan.memory import Memory
from recipe.runner.plan.model import ModelShape
from recipe.runner.plan.setup import Hardware, Setup


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step by part, and the batch they belong to."""

    generation_s: float
    log_probs_s: float
    update_s: float
    offload_s: float
    mean_prompt: float
    mean_response: float
    tokens: float
    concurrent: int
    separate: bool

    @property
    def training_s(self) -> float:
        """All but generation."""
        return self.log_probs_s + self.update_s + self.offload_s

    @property
    def total_s(self) -> float:
        """The parts follow each other; in ``mode=separate_async`` the slower of generation and training is the time.

        Rewards and validation are not counted.
        """
        return max(self.generation_s, self.training_s) if self.separate else self.generation_s + self.training_s

    @property
    def tokens_per_s(self) -> float:
        """Of prompts and responses."""
        return self.tokens / self.total_s


def estimate(model: ModelShape, setup: Setup, hardware: Hardware, memory: Memory) -> StepTime:
    """Generation, log-probs and update of one step.

    With F the operations of one forward pass over the step's tokens (:meth:`ModelShape.forward_flops`), on N GPUs:

    - log-probs: F for the old policy, and F for the reference at the share of steps that need it, over
      ``N * gpu_tflops * mfu``;
    - update: 3 F (forward and twice that for backward), 4 F with gradient checkpointing, times the epochs;
    - generation, for each replica: see :func:`generation_seconds`;
    - offloading: every byte that moves once to the GPU and back, over ``host_gb_per_s``.

    Lengths are taken as uniform about the mean (between 0 and twice the mean, at most the maximum) in sums of squares:
    E[L^2] = 4/3 mean^2. Load imbalance between ranks, pipeline bubbles and start-up are not modelled; ``mfu`` is where
    they go.
    """
    prompt = hardware.mean_prompt or setup.max_prompt / 8
    response = min(hardware.mean_response or setup.reference_length or setup.max_response / 2, setup.max_response)
    tokens = setup.sequences * (prompt + response)
    forward = model.forward_flops(tokens, setup.sequences * (prompt + response) ** 2 * 4 / 3)
    rate = setup.ranks * hardware.gpu_tflops * 1e12 * hardware.mfu
    generation, concurrent = generation_seconds(model, setup, hardware, memory, prompt, response)
    shard = model.parameters * setup.master_bytes / setup.shards
    # Weights: for old log-probs, update and synchronisation. Moments: for the update.
    moved = 2 * shard * (3 * setup.param_offload + 2 * setup.optimizer_offload)
    return StepTime(
        generation_s=generation,
        log_probs_s=forward * (1 + setup.reference_share) / rate,
        update_s=forward * (4 if setup.gradient_checkpointing else 3) * setup.epochs / rate,
        offload_s=moved / (hardware.host_gb_per_s * 1e9),
        mean_prompt=prompt,
        mean_response=response,
        tokens=tokens,
        concurrent=concurrent,
        separate=setup.rollout_gpus > 0,
    )


def generation_seconds(
    model: ModelShape, setup: Setup, hardware: Hardware, memory: Memory, prompt: float, response: float
) -> tuple[float, int]:
    """Seconds of decoding, and how many sequences a replica decodes at once.

    A replica of TP GPUs decodes ``c = min(its sequences, max_num_seqs, what the KV cache holds)`` sequences together.
    One decoding step reads the weights and the keys and values of c contexts at their mean length,
    ``(P bytes + c context kv_bytes) / (TP bandwidth decode_efficiency) + decode_overhead_ms``, or takes as long as the
    arithmetic if that is longer. ``sequences * mean_response / c`` such steps make all tokens; but no fewer steps than
    the longest response has tokens, and those beyond the former read the weights for a few last sequences only. In the
    asynchronous modes no step waits for the longest response.
    """
    replicas = setup.generating / setup.replica_gpus
    sequences = setup.sequences / replicas
    context = prompt + response / 2
    # Not the mean context: a sequence's blocks stay until it ends, and vLLM preempts when they run out.
    fits = memory.kv_tokens / (prompt + response)
    concurrent = max(1, math.floor(min(sequences, setup.max_num_seqs, fits)))
    bandwidth = setup.replica_gpus * hardware.gpu_tb_per_s * 1e12 * hardware.decode_efficiency
    rate = setup.replica_gpus * hardware.gpu_tflops * 1e12 * hardware.mfu
    weights = model.parameters * setup.vllm_bytes / bandwidth
    read = weights + concurrent * context * model.kv_bytes_per_token(setup.vllm_bytes) / bandwidth
    compute = model.forward_flops(concurrent, 0.0) / rate
    overhead = hardware.decode_overhead_ms / 1e3
    steps = sequences * response / concurrent
    tail = max(0.0, setup.max_response - steps) if setup.mode == "sync" else 0.0
    prefill = model.forward_flops(setup.prompts / replicas * prompt, 0.0) / rate  # a group shares its prompt's blocks
    return prefill + steps * (max(read, compute) + overhead) + tail * (weights + overhead), concurrent
