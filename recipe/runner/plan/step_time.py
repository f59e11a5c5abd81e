"""GPU hours of a run by the roofline: rates of the data sheet at a stated utilisation. An order of magnitude.

It answers whether a run takes tens, hundreds or thousands of GPU hours. It does not tell layouts or algorithms apart:
everything in NOT_COUNTED is left out, and the estimate is printed with what it assumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from recipe.runner.plan.memory import Memory
from recipe.runner.plan.model import ModelShape
from recipe.runner.plan.setup import Hardware, Setup

NOT_COUNTED: Final = "waits for the slowest response or rank, networks, offloading, rewards, validations, saves, starts"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and what they follow from. ``gpus``: those that train and those that only generate."""

    generation: float
    training: float
    total: float
    gpus: int
    assumed: str

    def lines(self, steps: int | None) -> list[str]:
        """The estimate with its assumptions; ``steps`` of the run, if they are known."""
        total, generation, training = map(_rounded, (self.total, self.generation, self.training))
        line = f"roofline: a step {total} s (generation {generation}, training {training})"
        if steps:
            hours = _rounded(steps * self.total * self.gpus / 3600)
            line += f"; {steps} steps on {self.gpus} GPUs: {hours} GPU hours"
        return [line, f"  assumed: {self.assumed}; not counted: {NOT_COUNTED}"]


def _rounded(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"


def step_time(model: ModelShape, setup: Setup, hardware: Hardware, memory: Memory) -> StepTime:
    """Seconds of a step at ``utilisation`` of a GPU's peak arithmetic and of its bandwidth.

    Generation: a replica decodes c responses together, half done on average (prompt + response / 2 tokens of keys and
    values), where c is the least of its responses, ``max_num_seqs`` and what its KV cache holds. A decoding step makes
    c tokens. It reads the weights and c contexts, or takes as long as the arithmetic if that is longer. Each prompt is
    read once for its group.

    Training: with F of one forward pass (:meth:`ModelShape.forward_flops`), F for pi_old and F for the reference where
    they have a pass; an update is 3 F, 4 F with gradient checkpointing, times the epochs.

    GPUs that train and generate do both one after the other; else the slower side counts.
    """
    prompt, response, n = hardware.mean_prompt, setup.mean_response, setup.rollout.n
    flops, bandwidth = (1e12 * hardware.utilisation * rate for rate in (hardware.gpu_tflops, hardware.gpu_tb_per_s))

    replicas = max(1, (setup.rollout_gpus or setup.ranks) // setup.replica_gpus)
    context, own = prompt + response / 2, setup.sequences / replicas
    together = max(1.0, min(own, setup.rollout.max_num_seqs, memory.kv_tokens / context))
    weights = model.parameters * setup.vllm_bytes
    cached = together * context * model.kv_bytes_per_token(setup.vllm_bytes)
    decoding = max((weights + cached) / bandwidth, together * model.forward_flops(1, 0) / flops)
    prefill = model.forward_flops(own / n * prompt, own / n * prompt**2) / flops
    generation = (own * response / together * decoding + prefill) / setup.replica_gpus

    length = prompt + response
    forward = model.forward_flops(setup.sequences * length, setup.sequences * length**2) / flops / setup.ranks
    update = (4 if setup.model.enable_gradient_checkpointing else 3) * setup.actor.ppo_epochs
    training = forward * (setup.has_old_pass + (setup.reference_share or 0.0) + update)
    return StepTime(
        generation,
        training,
        max(generation, training) if setup.rollout_gpus else generation + training,
        setup.ranks + setup.rollout_gpus,
        f"{prompt:g} + {response:g} tokens on average, {hardware.utilisation:g} of {hardware.gpu_tflops:g} Tflop/s and "
        f"{hardware.gpu_tb_per_s:g} TB/s a GPU",
    )
