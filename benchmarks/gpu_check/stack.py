"""The steps that start the real stack: four of Qwen3-8B's layers, a preemption of these, and the demo's task."""

from __future__ import annotations

import gc
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_check.steps import SIZES, Failed, Numbers, Size, has_flash_attention, over_noise, random_model
from benchmarks.models.char_tokenizer import build_tokenizer
from benchmarks.starts import SMALL
from fspo.audit import read_audit
from fspo.conclusion import exponent_of, within_mini_batches
from fspo.fairness.lre import wilson_interval
from fspo.files import read_lines
from fspo.metrics import SAFE_MARGIN
from recipe.runner.faults.preemption import PREEMPTED, STOP_FILE

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_FSDP = f"{_ACTOR}.fsdp_config"
_REWARD = "+reward.custom_reward_function.reward_kwargs"
_SDPA = "actor_rollout_ref.model.override_config.attn_implementation=sdpa"
ATTENTION = () if has_flash_attention() else (_SDPA,)
_PARAM_DTYPES = [f"++actor_rollout_ref.{part}.fsdp_config.mixed_precision.param_dtype" for part in ("actor", "ref")]
#: flash-attn has no fp32.
PRECISIONS = {
    "fp32": (*(f"{key}=fp32" for key in _PARAM_DTYPES), f"{_ROLLOUT}.dtype=float32", _SDPA),
    "bf16": (*(f"{key}=bf16" for key in _PARAM_DTYPES), f"{_ROLLOUT}.dtype=bfloat16"),
}
ON_A_CPU = (*SMALL, "trainer.test_freq=2", "trainer.save_freq=2")
#: What of the smoke test a CPU can do.
SHAPED_ON_A_CPU = (
    *ON_A_CPU, *PRECISIONS["bf16"], "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    f"{_FSDP}.param_offload=true", f"{_FSDP}.optimizer_offload=true",
    f"{_REWARD}.overlong_buffer=64", f"{_REWARD}.max_response_length=64",
)  # fmt: skip
#: The 8B job on the demo's task and a small model: short sequences, one worker for each of Ray's services.
SMALL_JOB = (
    "experiment=qwen3_8b",
    '+data.offline_task={folder: "${trainer.default_local_dir}/data", n_train: 4096, n_test: 256, seed: 0}',
    "data.train_files=${data.offline_task.folder}/train.parquet",
    "data.val_files=${data.offline_task.folder}/test.parquet", "data.max_prompt_length=16",
    "data.max_response_length=256", f"{_ACTOR}.optim.lr_warmup_steps=0", f"{_ROLLOUT}.n=8",
    f"{_ROLLOUT}.gpu_memory_utilization=0.3", f"{_ROLLOUT}.max_model_len=512", f"{_ROLLOUT}.max_num_seqs=256",
    f"{_ROLLOUT}.val_kwargs.n=1", f"{_ROLLOUT}.agent.num_workers=1", "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)  # fmt: skip
#: Two steps of about 38,000 tokens a mini-batch, two packs on one GPU, and a save of 24 GB. Random weights never earn a
#: reward; without differences within a group nothing would move.
SMOKE = (
    *SMALL_JOB, "data.train_batch_size=256", f"{_ACTOR}.ppo_mini_batch_size=64",
    f"{_ACTOR}.ulysses_sequence_parallel_size=${{trainer.n_gpus_per_node}}",
    f"{_ROLLOUT}.tensor_model_parallel_size=${{trainer.n_gpus_per_node}}",
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=512",  # the embeddings are larger
    f"{_REWARD}.overlong_buffer=256", f"{_REWARD}.max_response_length=256", "trainer.experiment_name=gpu_smoke",
    "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=2",
    "trainer.max_actor_ckpt_to_keep=null",  # one is saved; a run that keeps two does not start without room for them
)  # fmt: skip
#: The demo's run (conf/experiment/demo.yaml) on a GPU. Without compilation vLLM starts in half the time.
LEARN = (
    *SMALL_JOB, "data.train_batch_size=32", "actor_rollout_ref.model.path=pkg://recipe.math.data/assets/demo_model",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false", f"{_ACTOR}.ppo_mini_batch_size=8",
    f"{_ACTOR}.ppo_max_token_len_per_gpu=8192", f"{_ACTOR}.optim.lr=1e-4", f"{_ACTOR}.optim.weight_decay=0.01",
    f"{_FSDP}.param_offload=false", f"{_FSDP}.optimizer_offload=false", f"{_ROLLOUT}.tensor_model_parallel_size=1",
    f"{_ROLLOUT}.enforce_eager=true", "trainer.experiment_name=gpu_learn", "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=20", "trainer.test_freq=20", "trainer.save_freq=-1",
)  # fmt: skip
#: vLLM's and the trainer's probabilities of a token differ by about 1e-3 in bf16; above this they are not one policy.
LARGEST_DIFFERENCE = 0.05
#: Qwen3-8B's widths, so that its kernels run, in four layers: two steps with the job's packs take about 70 GiB.
WIDE = (151_936, 4096, 12_288, 4, 32, 8, 128)


@torch.no_grad()
def write_model(folder: Path, size: Size, device: str, mean_length: int) -> None:
    """Random weights in bf16, untied, with a tokenizer; a token is the last with probability 1 over ``mean_length``.

    Every token of the vocabulary is a character of its own. The row of the end's logits points along the mean of the
    last hidden states, so that a response may end at any token; random weights would always use the whole length. Its
    length is fitted on other tokens than its direction: a mean over T tokens holds 1/T of each of them, which in a wide
    model is more than what they have in common, and responses would hardly end.
    """
    vocabulary = size.shape[0]
    characters = "0123456789%-=" + "".join(chr(code) for code in range(0x10000, 0x10000 + vocabulary))
    tokenizer = build_tokenizer(characters[: vocabulary - 3], max_length=4096)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = random_model(size, device, torch.float32, **ends)

    def hidden_states(sequences: int, seed: int) -> torch.Tensor:
        tokens = torch.randint(vocabulary, (sequences, 32), generator=torch.Generator().manual_seed(seed))
        return model.model(tokens.to(device)).last_hidden_state.flatten(0, 1)

    mean, hidden = hidden_states(1024, seed=0).mean(0), hidden_states(128, seed=1)
    total = (hidden @ model.lm_head.weight.T).logsumexp(-1)
    along = hidden @ mean / mean.dot(mean)
    scales = torch.linspace(0, 20, 201).tolist()
    scale = min(scales, key=lambda one: abs((one * along - total).sigmoid().mean().item() - 1 / mean_length))
    model.lm_head.weight[tokenizer.eos_token_id] = scale * mean / mean.dot(mean)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(folder: Path, overrides: tuple[str, ...], steps: int) -> list[dict[str, float]]:
    """``recipe.fspo.main`` in a new run folder; the metrics of its steps, those of the first validation as step 0."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "recipe.fspo.main", f"trainer.default_local_dir={folder}", *overrides]
    print("+", *command[1:], flush=True)
    status = subprocess.run(command).returncode  # its output goes into this step's log
    by_step: dict[int, dict[str, float]] = {0: {}}
    for line in read_lines(folder / "metrics.jsonl"):
        by_step.setdefault(line["step"], {}).update(line["metrics"])
    done = sum("timing_s/update_actor" in metrics for metrics in by_step.values())
    if status or done != steps:
        raise Failed(f"the run ended with status {status} after {done} of {steps} steps")
    return [by_step[step] for step in sorted(by_step)]


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
        raise Failed("rounding between the two passes is near the band's edge: compute in fp16 or fp32", numbers)
    return numbers


def smoke_job(folder: Path, device: str, gpus: int) -> tuple[tuple[str, ...], Numbers]:
    """Overrides of the smoke test on this device, with its model, which is written to FOLDER/model if it is not there.

    On a GPU widths and packs are the 8B job's, so that its kernels round; its sequences are short.
    """
    model, overrides, numbers = folder / "model", SHAPED_ON_A_CPU, dict[str, float | str]()
    size = SIZES[device]
    if device == "cuda":
        # sdpa computes all scores of a pack, so that it gets shorter ones.
        size = replace(size, shape=WIDE, pack=20_480 if has_flash_attention() else 8192)
        words = (f"trainer.n_gpus_per_node={gpus}", f"{_ACTOR}.ppo_max_token_len_per_gpu={size.pack}")
        overrides = (*SMOKE, *words, *ATTENTION)
        numbers = {"tokens of a pack": size.pack}
    if not (model / "tokenizer.json").is_file():  # which is written last
        write_model(model, size, device, mean_length=64 if device == "cuda" else 24)
        gc.collect()
        if device == "cuda":  # this process lives on, and the run takes all of the GPU
            torch.cuda.empty_cache()
    return (*overrides, f"actor_rollout_ref.model.path={model}"), {"width": size.shape[1]} | numbers


def smoke(folder: Path, device: str, gpus: int) -> Numbers:
    """What the 8B job uses, on a model with random weights; TP and Ulysses over two GPUs."""
    overrides, numbers = smoke_job(folder, device, gpus)
    return numbers | verdict(train(folder / "smoke", overrides, 2)[1:])


def preemption(folder: Path, device: str, gpus: int) -> Numbers:
    """A warning in the middle of the smoke test: it saves, ends with status 75, and the next start resumes it."""
    overrides, _ = smoke_job(folder, device, gpus)
    run = folder / "preemption"
    shutil.rmtree(run, ignore_errors=True)
    settings = ("trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.test_freq=-1")
    command = [sys.executable, "-m", "recipe.fspo.main", *overrides, *settings, f"trainer.default_local_dir={run}"]
    process = subprocess.Popen(command)
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.2)
    if process.poll() is None:
        (run / STOP_FILE).touch()
    begin = time.monotonic()
    status = process.wait()
    seconds, saved = time.monotonic() - begin, sorted(path.name for path in run.glob("global_step_*"))
    numbers: Numbers = {"status": status, "from warning to end, s": seconds, "saved": ", ".join(saved) or "nothing"}
    if status != PREEMPTED or not saved:
        raise Failed(f"a warning should end the run with status {PREEMPTED} and a checkpoint", numbers)
    done = subprocess.run(command).returncode
    steps_done = [
        line["step"] for line in read_lines(run / "metrics.jsonl") if "timing_s/update_actor" in line["metrics"]
    ]
    numbers |= {"status of the next start": done, "steps of both": ", ".join(map(str, steps_done))}
    if done or steps_done != [1, 2, 3]:
        raise Failed("the next start should go on after the checkpoint to step 3", numbers)
    return numbers


def learn(folder: Path, device: str, gpus: int) -> Numbers:
    """The demo's task and model in fp32 and in bf16, twenty steps each; on a CPU two small ones, which learn nothing.

    Fails on a GPU if the intervals of the held-out accuracy before and after a run overlap.
    """
    job, steps, problems = (*LEARN, *ATTENTION), 20, 256
    if device == "cpu":
        job, steps, problems = (*ON_A_CPU, "trainer.val_before_train=true"), 2, 8
    numbers, same = Numbers(), []
    for name, precision in PRECISIONS.items():
        run = folder / f"learn-{name}"
        try:
            metrics = train(run, (*job, *precision), steps)
        except Failed as failure:
            raise Failed(f"{name}: {failure}", numbers) from failure  # the other run's numbers are kept
        numbers |= {f"{name}: {key}": value for key, value in learned(run, metrics).items()}
        before, after = (accuracy(step, problems) for step in (metrics[0], metrics[-1]))
        for key, (value, low, high) in {"before": before, "after": after}.items():
            numbers[f"{name}: held-out accuracy {key}"] = f"{value:.3f} [{low:.3f}, {high:.3f}]"
        if device == "cuda" and after[1] <= before[2]:
            same.append(name)
    if same:
        raise Failed(f"the intervals of the accuracy before and after overlap in {' and '.join(same)}", numbers)
    return numbers


def accuracy(metrics: Mapping[str, float], problems: int) -> tuple[float, float, float]:
    """Held-out accuracy of a step that validated, and its 95% interval (Wilson's)."""
    (value,) = (value for name, value in metrics.items() if re.fullmatch(r"val-core/.*/acc/mean@1", name))
    low, high = wilson_interval(value, problems)
    return value, float(low), float(high)


def learned(run: Path, metrics: Sequence[Mapping[str, float]]) -> Numbers:
    """What a run's metrics and rows say: how far it moved, by length, and over which noise."""
    steps = [step for step in metrics if "timing_s/update_actor" in step]
    moved = read_audit(run).responses.moved()
    count_J, tokens_J, squares_J = (column.sum(0) for column in within_mini_batches(moved, moved.s_B))
    stds = zip(tokens_J / count_J, np.sqrt(squares_J / count_J), strict=True)
    exponent = exponent_of(moved)
    margin = min(step.get("fspo/noise_floor/margin", math.inf) for step in steps)  # left out where S is exactly 0
    # A first mini-batch without a gradient has none.
    noise = [step[name] for step in steps if (name := "fspo/first_minibatch_z_rms") in step]
    return {
        "a step, s (median)": statistics.median(step["timing_s/step"] for step in steps),
        "reward, first step": steps[0]["critic/rewards/mean"],
        "reward, last step": steps[-1]["critic/rewards/mean"],
        "std of S, by mean length": "; ".join(f"{length:.0f}: {std:.3g}" for length, std in stds),
        "S spreads like L to the": f"{exponent.value:.2f} [{exponent.low:.2f}, {exponent.high:.2f}]",
        "S / sqrt(L) before an update, largest rms": max(noise, default=math.nan),
        "half-width of the band over the noise": over_noise(margin),
        "probabilities of vLLM and trainer differ by": steps[-1]["training/rollout_probs_diff_mean"],
    }
