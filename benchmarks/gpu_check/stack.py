"""The steps that start the real stack, two training steps each: the demo's model, then one shaped like Qwen3-0.6B."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.steps import Failed, Size, Skipped, random_model
from benchmarks.models.char_tokenizer import build_tokenizer
from benchmarks.starts import SMALL
from fspo.records import complete_lines

_FSDP = "actor_rollout_ref.actor.fsdp_config"
_REWARD = "+reward.custom_reward_function.reward_kwargs"
ON_A_CPU = (*SMALL, "trainer.test_freq=2", "trainer.save_freq=2")
#: What of experiment=gpu_smoke a CPU can do.
SHAPED_ON_A_CPU = (
    *ON_A_CPU,
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=bf16",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "actor_rollout_ref.actor.pad_to_length=true",
    f"{_FSDP}.mixed_precision.param_dtype=bf16",
    f"{_FSDP}.param_offload=true",
    f"{_FSDP}.optimizer_offload=true",
    f"{_FSDP}.pad_to_length_bucket=2048",
    f"{_REWARD}.overlong_buffer=64",
    f"{_REWARD}.max_response_length=64",
)
#: vLLM's and the trainer's probabilities of a token differ by about 1e-3 in bf16; above this they are not one policy.
LARGEST_DIFFERENCE = 0.05


@torch.no_grad()
def write_model(folder: Path, size: Size, device: str, mean_length: int) -> None:
    """A model with random weights in bf16, untied; a token is the last with a probability of 1 over ``mean_length``.

    Every token of the vocabulary is a character of its own. The row of the end's logits points along the mean of the
    last hidden states, so that a response may end at any token; random weights would always use the whole length.
    """
    vocabulary = size.shape[0]
    characters = "0123456789%-=" + "".join(chr(code) for code in range(0x10000, 0x10000 + vocabulary))
    tokenizer = build_tokenizer(characters[: vocabulary - 3], max_length=4096)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = random_model(size, device, torch.float32, **ends)
    tokens = torch.randint(vocabulary, (128, 32), generator=torch.Generator().manual_seed(0)).to(device)
    hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
    mean, total = hidden.mean(0), model.lm_head(hidden).logsumexp(-1)
    along = hidden @ mean / mean.dot(mean)
    scales = torch.linspace(0, 20, 201).tolist()
    scale = min(scales, key=lambda each: abs((each * along - total).sigmoid().mean().item() - 1 / mean_length))
    model.lm_head.weight[tokenizer.eos_token_id] = scale * mean / mean.dot(mean)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(folder: Path, overrides: tuple[str, ...]) -> str:
    """Two steps of ``recipe.fspo.main`` in a new run folder, and what its metrics say."""
    missing = [name for name in ("verl", "ray", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"not installed: {', '.join(missing)}")
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "recipe.fspo.main", f"run.dir={folder}", *overrides]
    print("+", *command[1:], flush=True)
    status = subprocess.run(command).returncode  # its output goes into this step's log
    steps = [line["metrics"] for line in complete_lines(folder / "metrics.jsonl")]
    steps = [metrics for metrics in steps if "timing_s/update_actor" in metrics]
    if status or len(steps) != 2:
        raise Failed(f"the run ended with status {status} after {len(steps)} of 2 steps")
    last: dict[str, Any] = steps[-1]
    difference = last["training/rollout_probs_diff_mean"]
    text = (
        f"a step {last['timing_s/step']:.1f} s (generation {last['timing_s/gen']:.1f}, update "
        f"{last['timing_s/update_actor']:.1f}), lengths {last['response_length/min']:.0f} to "
        f"{last['response_length/max']:.0f}; probabilities of vLLM and trainer differ by {difference:.1g}; "
        f"S / sqrt(L) before the first update {last['fspo/first_minibatch_z_rms']:.2g} (its band: 0.03); "
        f"gradient norm {last['actor/grad_norm']:.2g}"
    )
    if difference > LARGEST_DIFFERENCE:
        raise Failed(f"vLLM and trainer are not one policy; {text}")
    margins = [value for name, value in last.items() if "noise_floor/" in name and name.endswith("/margin")]
    return text + "".join(f", half-width of the band over it {margin:.3g}" for margin in margins)


def demo(folder: Path, device: str) -> str:
    """The whole stack with the demo's model on one GPU."""
    model = "actor_rollout_ref.model.path=pkg://fspo.data/assets/demo_model"
    return train(folder / "demo", ON_A_CPU if device == "cpu" else ("experiment=gpu_smoke", model))


def smoke_on(gpus: int) -> tuple[str, ...]:
    """``experiment=gpu_smoke`` on one or two GPUs; all packs have one shape, the token budgets of all Ulysses ranks."""
    return ("experiment=gpu_smoke", f"trainer.n_gpus_per_node={gpus}", f"{_FSDP}.pad_to_length_bucket={4096 * gpus}")


def smoke(folder: Path, size: Size, device: str, gpus: int) -> str:
    """``experiment=gpu_smoke``: what the 8B job uses, on a model with random weights; TP and Ulysses over two GPUs."""
    model = folder / "model"
    write_model(model, size, device, mean_length=64 if device == "cuda" else 24)
    overrides = smoke_on(gpus) if device == "cuda" else SHAPED_ON_A_CPU
    return train(folder / "smoke", (*overrides, f"actor_rollout_ref.model.path={model}"))
