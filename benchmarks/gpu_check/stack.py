"""The steps that start the real stack: the demo's model, then four of Qwen3-8B's layers, then a preemption of these."""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.steps import Failed, Numbers, Size, Skipped, over_noise, random_model
from benchmarks.models.char_tokenizer import build_tokenizer
from benchmarks.starts import SMALL, Start
from fspo.diagnostics import SAFE_MARGIN
from fspo.records import complete_lines
from recipe.runner.faults.preemption import PREEMPTED, ask_to_stop

_FSDP = "actor_rollout_ref.actor.fsdp_config"
_REWARD = "+reward.custom_reward_function.reward_kwargs"
ON_A_CPU = (*SMALL, "trainer.test_freq=2", "trainer.save_freq=2")
#: What of experiment=gpu_smoke a CPU can do.
SHAPED_ON_A_CPU = (
    *ON_A_CPU,
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=bf16",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    f"{_FSDP}.mixed_precision.param_dtype=bf16",
    f"{_FSDP}.param_offload=true",
    f"{_FSDP}.optimizer_offload=true",
    f"{_REWARD}.overlong_buffer=64",
    f"{_REWARD}.max_response_length=64",
)
#: vLLM's and the trainer's probabilities of a token differ by about 1e-3 in bf16; above this they are not one policy.
LARGEST_DIFFERENCE = 0.05
#: Qwen3-8B's widths, so that its kernels run, in four layers. GiB of a GPU on which two steps with the job's packs fit.
WIDE, WIDE_GIB = (151_936, 4096, 12_288, 4, 32, 8, 128), 70
#: Qwen3-0.6B's shape, for smaller ones.
NARROW = (151_936, 1024, 3072, 28, 16, 8, 128)


def write_model(folder: Path, size: Size, device: str, mean_length: int) -> None:
    """A model of :func:`ending_model` in bf16, and its tokenizer, in a folder."""
    model, tokenizer = ending_model(size, device, torch.float32, mean_length)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    gc.collect()
    if device == "cuda":  # this process lives on, and what comes next takes all of the GPU: a run, or vLLM here
        torch.cuda.empty_cache()


@torch.no_grad()
def ending_model(size: Size, device: str, dtype: torch.dtype, mean_length: int) -> tuple[Any, Any]:
    """A model with random weights, untied; a token is the last with a probability of 1 over ``mean_length``.

    Every token of the vocabulary is a character of its own. The row of the end's logits points along the mean of the
    last hidden states, so that a response may end at any token; random weights would always use the whole length. Its
    length is fitted on other tokens than its direction: a mean over T tokens holds 1/T of each of them, which in a wide
    model is more than what they have in common, and responses would hardly end.
    Returns the model and its tokenizer.
    """
    vocabulary = size.shape[0]
    characters = "0123456789%-=" + "".join(chr(code) for code in range(0x10000, 0x10000 + vocabulary))
    tokenizer = build_tokenizer(characters[: vocabulary - 3], max_length=4096)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = random_model(size, device, dtype, **ends)

    def hidden_states(sequences: int, seed: int) -> torch.Tensor:
        tokens = torch.randint(vocabulary, (sequences, 32), generator=torch.Generator().manual_seed(seed))
        return model.model(tokens.to(device)).last_hidden_state.flatten(0, 1).float()

    mean, hidden = hidden_states(1024, seed=0).mean(0), hidden_states(128, seed=1)
    total = (hidden @ model.lm_head.weight.float().T).logsumexp(-1)
    along = hidden @ mean / mean.dot(mean)
    scales = torch.linspace(0, 20, 201).tolist()
    scale = min(scales, key=lambda one: abs((one * along - total).sigmoid().mean().item() - 1 / mean_length))
    model.lm_head.weight[tokenizer.eos_token_id] = (scale * mean / mean.dot(mean)).to(dtype)
    return model, tokenizer


def train(folder: Path, overrides: tuple[str, ...]) -> Numbers:
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
    return verdict(steps)


def verdict(steps: Sequence[Mapping[str, float]]) -> Numbers:
    """What the metrics of the steps say; :class:`Failed` if vLLM and trainer, or the two passes, are too far apart."""
    last, floor = steps[-1], "fspo/noise_floor/"
    difference = last["training/rollout_probs_diff_mean"]
    margin = min(metrics.get(f"{floor}margin", math.inf) for metrics in steps)  # left out where S is exactly 0
    numbers: Numbers = {
        "step, s": last["timing_s/step"],
        "generation, s": last["timing_s/gen"],
        "update, s": last["timing_s/update_actor"],
        "shortest response, tokens": last["response_length/min"],
        "longest response, tokens": last["response_length/max"],
        "probabilities of vLLM and trainer differ by": difference,
        "S / sqrt(L) before the first update (its band: 0.03)": steps[0]["fspo/first_minibatch_z_rms"],
        "half-width of the band over the noise": over_noise(margin),
        "gradient norm": last["actor/grad_norm"],
    }
    if difference > LARGEST_DIFFERENCE:
        raise Failed(f"vLLM and trainer are not one policy: their probabilities differ by {difference:.2g}", numbers)
    if not any(name.startswith(floor) for metrics in steps for name in metrics):
        raise Failed(f"no step has measured the noise floor ({floor}*)", numbers)
    if margin < SAFE_MARGIN:
        raise Failed(
            f"rounding between the two passes is within {margin:.1f} of the band's edge ({floor}margin below "
            f"{SAFE_MARGIN:.0f}): compute in fp16 or fp32 (docs/studies/noise-floor.md)",
            numbers,
        )
    return numbers


def demo(folder: Path, device: str) -> Numbers:
    """The whole stack with the demo's model on one GPU."""
    model = "actor_rollout_ref.model.path=pkg://recipe.math.data/assets/demo_model"
    return train(folder / "demo", ON_A_CPU if device == "cpu" else (*smoke_on(1, 8192), *attention(), model))


def v1(folder: Path, device: str) -> Numbers:
    """The same with vLLM's older model runner, to which the pages send those whose vLLM fails."""
    if device == "cpu":
        raise Skipped("vLLM has one model runner on CPUs")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return demo(folder / "v1", device)


def attention() -> tuple[str, ...]:
    """sdpa where flash-attn's kernels are not installed; a package of its Triton cross-entropy alone may be."""
    has_kernels = importlib.util.find_spec("flash_attn_2_cuda") is not None
    return () if has_kernels else ("actor_rollout_ref.model.override_config.attn_implementation=sdpa",)


def smoke_on(gpus: int, tokens: int = 20_480) -> tuple[str, ...]:
    """``experiment=gpu_smoke`` on one or two GPUs, with packs of at most so many tokens on each."""
    budget = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}"
    return ("experiment=gpu_smoke", f"trainer.n_gpus_per_node={gpus}", budget)


def smoke_job(folder: Path, size: Size, device: str, gpus: int, anew: bool = True) -> tuple[tuple[str, ...], Numbers]:
    """Overrides of ``experiment=gpu_smoke`` on this device, with its model in FOLDER/model, and its width and packs.

    The model is written, but where it need not be made ``anew`` and is there.
    Widths and packs are the 8B job's, so that its kernels round; on a small GPU those of Qwen3-0.6B.
    """
    model, overrides = folder / "model", SHAPED_ON_A_CPU
    if device == "cuda":
        is_wide = torch.cuda.get_device_properties(0).total_memory >= WIDE_GIB * 2**30
        # sdpa computes all scores of a pack, so that it gets shorter ones.
        wide, narrow = (
            replace(size, shape=WIDE, pack=8192 if attention() else 20_480),
            replace(size, shape=NARROW, pack=4096),
        )
        size = wide if is_wide else narrow
        overrides = (*smoke_on(gpus, size.pack), *attention())
    if anew or not (model / "tokenizer.json").is_file():  # which is written last
        write_model(model, size, device, mean_length=64 if device == "cuda" else 24)
    numbers: Numbers = {"width": size.shape[1]} | ({"tokens of a pack": size.pack} if device == "cuda" else {})
    return (*overrides, f"actor_rollout_ref.model.path={model}"), numbers


def smoke(folder: Path, size: Size, device: str, gpus: int) -> Numbers:
    """``experiment=gpu_smoke``: what the 8B job uses, on a model with random weights; TP and Ulysses over two GPUs."""
    overrides, numbers = smoke_job(folder, size, device, gpus)
    return numbers | train(folder / "smoke", overrides)


def preemption(folder: Path, size: Size, device: str, gpus: int) -> Numbers:
    """A warning in the middle of the smoke test: it saves, ends with status 75, and the next start resumes it."""
    overrides, _ = smoke_job(folder, size, device, gpus, anew=False)
    run = folder / "preemption"
    shutil.rmtree(run, ignore_errors=True)
    steps = ("trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.test_freq=-1", f"run.dir={run}")
    words = ("recipe.fspo.main", *overrides, *steps)
    start = Start(folder, *words, log="preemption-run.log", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    try:
        while start.process.poll() is None and not (run / "metrics.jsonl").exists():
            time.sleep(0.2)
        if (ended := start.process.poll()) is not None:
            raise Failed(f"the run ended with status {ended} before its first step, without a warning: {start.log}")
        ask_to_stop(run)
        begin = time.monotonic()
        status = start.process.wait()
    finally:
        start.stop()
    seconds, saved = time.monotonic() - begin, sorted(path.name for path in run.glob("checkpoints/global_step_*"))
    numbers: Numbers = {"status": status, "from warning to end, s": seconds, "saved": ", ".join(saved) or "nothing"}
    if status != PREEMPTED or not saved:
        raise Failed(f"a warning should end the run with status {PREEMPTED} and a checkpoint", numbers)
    done = subprocess.run([sys.executable, "-m", *words]).returncode
    steps_done = [
        line["step"] for line in complete_lines(run / "metrics.jsonl") if "timing_s/update_actor" in line["metrics"]
    ]
    numbers |= {"status of the next start": done, "steps of both": ", ".join(map(str, steps_done))}
    if done or steps_done != [1, 2, 3]:
        raise Failed("the next start should go on after the checkpoint to step 3", numbers)
    return numbers
