"""verl's engine and vLLM's, each alone: what the whole stack would hide, and which of the two a fault is in."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.stack import (
    SHAPED_ON_A_CPU,
    WIDE,
    attention,
    ending_model,
    smoke_on,
    write_model,
)
from benchmarks.gpu_check.steps import (
    BANDS,
    Failed,
    Numbers,
    Size,
    log_probs,
    over_noise,
    packs,
    policy_losses,
    process_group,
    random_tokens,
)
from fspo.diagnostics import noise_floor
from fspo.losses import ALGORITHMS
from fspo.responses import Responses

GIB = 2**30
#: Dense bf16 of an H100 with a board of 700 W, FLOP/s (NVIDIA's data sheet).
PEAK_FLOPS = 989e12
#: Tokens of a prompt, and parts of the batch. On a GPU its sequences have 16 to 2,048 tokens.
PROMPT, MINI_BATCHES = 4, 2
#: By how much of its change the weights' norm may differ when an update is repeated. A GPU adds in another order each
#: time, in attention's backward pass and into embeddings; without Adam's moments the change would be quite another.
REPEATED = {"cpu": 1e-3, "cuda": 0.05}


def peak_gib(device: str) -> float:
    """Largest memory since the last call, in GiB; 0 on a CPU."""
    if device == "cpu":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    return peak


def batch_of(rows: Sequence[torch.Tensor]) -> Any:
    """What the trainer gives a worker: prompts of four tokens, responses, advantages 1 and -1 in turn."""
    from tensordict import TensorDict

    rows = [row.cpu() for row in rows]
    masks = [torch.ones(len(row) - PROMPT, dtype=torch.int64) for row in rows]
    columns = {
        "prompts": [row[:PROMPT] for row in rows],
        "responses": [row[PROMPT:] for row in rows],
        "input_ids": list(rows),
        "position_ids": [torch.arange(len(row)) for row in rows],
        "response_mask": masks,
        "loss_mask": [mask.clone() for mask in masks],
        "advantages": [(1.0 - 2.0 * (i % 2)) * mask.float() for i, mask in enumerate(masks)],
    }
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()}
    return TensorDict(nested, batch_size=len(rows))


class Policy:
    """The recipe's worker around verl's FSDP engine, as a rank of the process group.

    ``tokens`` are this rank's sequences, ``mini_batch`` is the number of sequences of a mini-batch over all ranks.
    """

    def __init__(self, config: Any, folder: Path, tokens: list[torch.Tensor], mini_batch: int) -> None:
        from recipe.fspo.in_runner.worker import RunWorker

        self.worker = RunWorker(config=config.actor_rollout_ref, role="actor")
        self.worker.init_model()
        self.worker.record()
        self.worker.begin_run(str(folder))
        self.tokens, self.mini_batch = tokens, mini_batch

    def answer(self, question: Any) -> Any:
        """What the worker infers."""
        return self.worker.compute_log_prob(question)

    def log_probs(self, same_packs: bool = True) -> Any:
        """The batch with pi_old from a pass of its own, in the packs of the update or, as verl, of all rows."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import response_from_nested

        data = batch_of(self.tokens)
        question = data.clone()
        of_packs = {"mini_batch_size": self.mini_batch} if same_packs else {}
        tu.assign_non_tensor(question, calculate_entropy=True, compute_loss=False, temperature=1.0, **of_packs)
        data["old_log_probs"] = response_from_nested(self.answer(question)["log_probs"], data["response_mask"])
        return data

    def update(self, data: Any) -> list[float]:
        """One update; the largest |S| of each mini-batch, on a rank that speaks for its group."""
        from verl.utils import tensordict_utils as tu

        size = {"global_batch_size": self.mini_batch, "mini_batch_size": self.mini_batch, "epochs": 1, "seed": 1}
        order = {"dataloader_kwargs": {"shuffle": False}}
        tu.assign_non_tensor(data, calculate_entropy=False, temperature=1.0, **order, **size)
        self.worker.begin_update(None, 0)
        self.worker.update_actor(data)
        return [float(np.nanmax(np.abs(part.rows["S"]))) for part in self.worker.pop_mini_batches() or ()]

    def norm(self) -> float:
        """Euclidean norm of the weights, in float64."""
        return float(self.worker.parameter_norm())


def settings(device: str, folder: Path, size: Size) -> Any:
    """The configuration of the 8B job's smoke test, composed."""
    from recipe.fspo.job import compose

    own = [f"actor_rollout_ref.model.path={folder / 'model'}", f"run.dir={folder / 'run'}"]
    if device == "cpu":
        return compose([*SHAPED_ON_A_CPU, *own])
    longest = f"data.max_response_length={size.longest}"
    return compose([*smoke_on(1, size.pack), *attention(), *own, longest])


def engine(folder: Path, size: Size, device: str) -> Numbers:
    """verl's engine at 8B's width: S of equal packs, memory beside the planner's, save, load and the same update."""
    if device == "cuda":
        size = replace(size, shape=WIDE, pack=8192)
    else:
        os.environ["VERL_PLATFORM"] = "cpu"  # before verl is imported
    folder = folder / "engine"
    shutil.rmtree(folder, ignore_errors=True)
    write_model(folder / "model", size, device, mean_length=64)
    with process_group(device):
        # verl's worker asks for them, and the group is there already.
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
        }
        config = settings(device, folder, size)
        policy = Policy(config, folder, random_tokens(size, device), size.sequences // MINI_BATCHES)
        count = sum(len(row) for row in policy.tokens)
        peak_gib(device)
        data = policy.log_probs()
        peaks = {"log_probs": peak_gib(device)}
        start = policy.norm()
        largest = policy.update(data)
        peaks["update"] = peak_gib(device)
        if (after := policy.norm()) == start:
            raise Failed(f"no weight has moved: the norm is {start!r} before and after an update")
        begin = time.perf_counter()
        policy.worker.save_checkpoint(local_path=str(folder / "saved"), global_step=1)
        saved, peaks["save"] = time.perf_counter() - begin, peak_gib(device)
        begin = time.perf_counter()
        policy.update(policy.log_probs())
        seconds, second = time.perf_counter() - begin, policy.norm()
        policy.worker.load_checkpoint(local_path=str(folder / "saved"))
        loaded = policy.norm()
        policy.update(policy.log_probs())
        again = policy.norm()
    parameters = sum(math.prod(p.shape) for p in policy.worker.actor.engine.module.parameters())
    written = sum(file.stat().st_size for file in (folder / "saved").rglob("*") if file.is_file())
    numbers: Numbers = {
        "parameters, 1e9": parameters / 1e9,
        "tokens": count,
        "tokens of a pack": size.pack,
        "largest |S| of the first mini-batch": largest[0],
        "largest |S| of the second mini-batch": largest[1],
        "log-probs and an update, s": seconds,
        "save, GB": written / 1e9,
        "save, GB/s": written / 1e9 / saved,
        "graphs compiled": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
        "norm after load off by": abs(loaded - after),
        "norm after the same update off by": abs(again - second),
    }
    if device == "cuda":  # 2 FLOP a parameter and token forwards, 4 backwards, 2 more to recompute
        numbers["tokens/s"] = count / seconds
        numbers["share of the peak"] = 10 * parameters * count / seconds / PEAK_FLOPS
        numbers |= compared(config, folder / "model", peaks)
    if largest[0] != 0:
        raise Failed("before any update, with equal packs, S should be exactly 0", numbers)
    if loaded != after or abs(again - second) > REPEATED[device] * abs(second - after):
        raise Failed("a checkpoint does not bring the same update back", numbers)
    return numbers


def compared(config: Any, model: Path, peaks: dict[str, float]) -> Numbers:
    """Each phase's peak beside what ``python -m recipe.fspo.plan`` expects of torch's allocator there."""
    from recipe.fspo.job import JOB
    from recipe.runner.plan.memory import predict
    from recipe.runner.plan.model import ModelShape, read_architecture
    from recipe.runner.plan.setup import Hardware, Setup

    fields, name = read_architecture(str(model), None)
    items = predict(ModelShape.from_config(fields, name), Setup(config, JOB), Hardware()).items
    outside = ("vLLM asleep", "vLLM's CUDA context", "CUDA, NCCL, fragmentation")
    numbers: Numbers = {}
    for phase, peak in peaks.items():
        planned = sum(value for item, value in items.get(phase, {}).items() if item not in outside) / GIB
        numbers |= {f"peak of {phase}, GiB": peak, f"peak of {phase} by the planner, GiB": planned}
    return numbers


def vllm(folder: Path, size: Size, device: str) -> Numbers:
    """vLLM with the 8B model's shape: its runner, speed, memory asleep and awake, and S between vLLM and the trainer.

    Both compute in bf16 with the same random weights. On a GPU vLLM gets them in this process, as from verl; on a CPU
    it has rearranged its own by then, and reads a file.
    """
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    folder = folder / "vllm"
    shutil.rmtree(folder, ignore_errors=True)
    if device == "cuda":
        size = replace(size, sequences=256)
    model, tokenizer = ending_model(size, device, torch.bfloat16, mean_length=400 if device == "cuda" else 24)
    if device == "cuda":
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder / "model")
    else:
        model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    if device == "cuda":
        torch.cuda.empty_cache()  # of making the model, or it would count as vLLM's
    free = [free_gib(device)]
    how: dict[str, Any] = {"gpu_memory_utilization": 0.1, "enforce_eager": True}  # of the host's memory
    if device == "cuda":  # the trainer's model stays beside it
        how = {"gpu_memory_utilization": 0.6, "enable_sleep_mode": True, "load_format": "dummy"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the runner is looked at in this process
    begin = time.perf_counter()
    llm = LLM(str(folder / "model"), max_model_len=size.longest, dtype="bfloat16", **how)
    start = time.perf_counter() - begin
    free.append(free_gib(device))
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    runner = f"{type(worker.model_runner).__module__}.{type(worker.model_runner).__name__}"
    if device == "cuda":
        worker.model_runner.model.load_weights((name, weight.detach()) for name, weight in model.named_parameters())
    limit = size.longest - PROMPT - 1
    whole = SamplingParams(max_tokens=limit, seed=0, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    prompts = [{"prompt_token_ids": [5 + i] * PROMPT} for i in range(size.sequences)]
    in_front_end = timed(llm.llm_engine.output_processor, "process_outputs")
    begin = time.perf_counter()
    outputs = [output.outputs[0] for output in llm.generate(prompts, whole, use_tqdm=False)]
    seconds, tokens = time.perf_counter() - begin, sum(len(output.token_ids) for output in outputs)
    numbers: Numbers = {
        "layers": size.shape[3],
        "model runner": runner,
        "start, s": start,
        "responses": len(outputs),
        "shortest response, tokens": min(len(output.token_ids) for output in outputs),
        "longest response, tokens": max(len(output.token_ids) for output in outputs),
        "tokens/s": tokens / seconds,
        "front end alone, tokens/s": tokens / sum(in_front_end),
    }
    if device == "cuda":
        begin = time.perf_counter()
        llm.sleep(level=2)
        free.append(free_gib(device))
        numbers["sleep, s"] = time.perf_counter() - begin
    numbers |= against_trainer(model.eval(), size, prompts, outputs)
    if device == "cuda":
        torch.cuda.empty_cache()
        begin = time.perf_counter()
        llm.wake_up()
        free.append(free_gib(device))
        numbers["wake, s"] = time.perf_counter() - begin
        names = ("before vLLM", "beside vLLM", "while vLLM sleeps", "after it woke up")
        numbers |= {f"free {name}, GiB": value for name, value in zip(names, free, strict=True)}
        if free[2] < free[1] + 0.5 * (free[0] - free[1]):
            raise Failed("asleep vLLM keeps more than half of its memory", numbers)
    if (off := float(numbers[APART])) > LARGEST_LOG_DIFFERENCE:
        raise Failed(f"vLLM and trainer are not one policy: {APART} {off:.2g}", numbers)
    return numbers


#: A number, and above what the two are not one policy. Random weights give every token a small probability, so that
#: probabilities would differ by little whatever the models are. No GPU has measured this number.
APART = "log-probabilities of vLLM and trainer differ by"
LARGEST_LOG_DIFFERENCE = 0.5


@torch.no_grad()
def against_trainer(model: Any, size: Size, prompts: Sequence[dict[str, list[int]]], outputs: Sequence[Any]) -> Numbers:
    """S of the trainer's pass in packs against vLLM's own log-probabilities, and each band's half-width over it."""
    device, rows, old = model.device, [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        rows.append(torch.tensor([*prompt["prompt_token_ids"], *output.token_ids], device=device))
        chosen = [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]
        old.append(torch.tensor(chosen, device=device))
    members = packs(rows, list(range(len(rows))), size.pack, one_shape=False)
    begin = time.perf_counter()
    by_row = dict(pair for pack in members for pair in log_probs(model, pack))
    new = [by_row[index][-len(own) :] for index, own in enumerate(old)]
    numbers: Numbers = {
        "trainer's pass, tokens/s": sum(map(len, rows)) / (time.perf_counter() - begin),
        APART: float(abs(torch.cat(new) - torch.cat(old)).mean()),
    }
    responses = Responses.of_output(policy_losses(new, old)["fspo"]())
    for name, algo in BANDS.items():
        floor = noise_floor(responses, 6, ALGORITHMS[algo])
        numbers[f"half-width of {name}'s band over S between them"] = over_noise(floor.margin)
    pairs = zip(floor.length_J, floor.rms_J, strict=True)
    numbers["rms of S between them, by mean length"] = "; ".join(f"{length:.0f}: {rms:.3g}" for length, rms in pairs)
    numbers["S between them / sqrt(L), rms"] = float(((responses.s_B**2 / responses.length_B).mean()) ** 0.5)
    numbers["S between them / L, mean"] = float(responses.s_B.sum() / responses.length_B.sum())
    return numbers


def timed(holder: Any, name: str) -> list[float]:
    """The seconds of each call of a method from now on; the list grows."""
    method, seconds = getattr(holder, name), []

    def call(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - begin)

    setattr(holder, name, call)
    return seconds


def free_gib(device: str) -> float:
    """Free memory of the GPU as CUDA counts it."""
    return torch.cuda.mem_get_info()[0] / GIB if device == "cuda" else 0.0
