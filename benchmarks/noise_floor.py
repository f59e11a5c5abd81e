"""What rounding does to the sequence log-ratio S, by length, against the bands: ``python -m benchmarks.noise_floor``.

Sampled responses of a model (the demo's, or any folder given by ``--model``) are scored before and after optimizer
steps in fp32. Three questions, each answered by length:

1. *floor*: S between two passes over the same weights that only differ in their kernels (sdpa and eager attention).
   It stands for a GPU on which batch shapes differ between the passes; on CPUs the floor of a run is exactly 0.
2. *error after an update*: S with weights and arithmetic in bf16 or fp16, minus S in fp32. Both have the same updates,
   made in fp32, as FSDP's mixed precision makes them.
3. *margin*: half-width of a band over the floor. Below 5 it clips noise.

Writes the tables into docs/noise-floor.md.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.models.demo_model import shipped_model
from benchmarks.pages import write_section
from fspo.data.offline_task import generate
from fspo.losses import ALGORITHMS, acceptance_band
from fspo.markdown import markdown_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "noise-floor.md"
BANDS = {"FSPO": "fspo", "RLOO": "seq_rloo", "GSPO": "seq_gspo"}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BINS = 5


def load(path: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()


@torch.no_grad()
def sample(model: PreTrainedModel, prompts: list[list[int]], max_new: int, end: int) -> list[tuple[int, list[int]]]:
    """(length of the prompt, tokens) of one response per prompt, at temperature 1."""
    found = []
    for prompt in prompts:
        tokens = model.generate(
            torch.tensor([prompt]), do_sample=True, max_new_tokens=max_new, eos_token_id=end, pad_token_id=end
        )
        found.append((len(prompt), tokens[0].tolist()))
    return found


def log_likelihood(model: PreTrainedModel, sequence: tuple[int, list[int]]) -> torch.Tensor:
    """Sum of the response tokens' log-probabilities; logits in the model's type, log-softmax in fp32, as in verl."""
    start, tokens = sequence
    logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[start:])[:, None]).sum(dtype=torch.float64)


@torch.no_grad()
def score(model: PreTrainedModel, sequences: list[tuple[int, list[int]]]) -> np.ndarray:
    return np.array([float(log_likelihood(model, sequence)) for sequence in sequences])


def train(model: PreTrainedModel, sequences: list[tuple[int, list[int]]], steps: int, lr: float) -> None:
    """Policy-gradient steps with random advantages: only how far the policy moves matters here."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(0)
    for part in torch.randperm(len(sequences), generator=generator).chunk(steps):
        optimizer.zero_grad()
        for index in part.tolist():
            sign = 1.0 if torch.rand(1, generator=generator) < 0.5 else -1.0
            (-sign * log_likelihood(model, sequences[index]) / len(part)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def chats_of(data: Path | None, problems: int) -> list[list[dict[str, str]]]:
    """Prompts of a data file of verl's, or of the demo's task."""
    if data is None:
        return [[{"role": "user", "content": problem.question}] for problem in generate(problems, 0, 0)[0]]
    return [list(prompt) for prompt in pq.read_table(data)["prompt"].to_pylist()[:problems]]


def measure(path: Path, chats: list[list[dict[str, str]]], steps: int, lr: float) -> tuple[str, str]:
    """The two tables: S and its errors by length, and the margins of the bands."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    torch.manual_seed(0)
    start = load(path, torch.float32, "sdpa")
    sequences = [s for s in sample(start, prompts, 256, tokenizer.eos_token_id) if len(s[1]) > s[0]]
    trained = copy.deepcopy(start)
    train(trained, sequences, steps, lr)
    shift, floor = {}, {}
    for name, dtype in {"fp32": torch.float32, **TYPES}.items():
        before = score(copy.deepcopy(start).to(dtype), sequences)
        shift[name] = score(copy.deepcopy(trained).to(dtype), sequences) - before
        floor[name] = score(load(path, dtype, "eager"), sequences) - before
    exact = shift["fp32"]
    lengths = np.array([len(tokens) - begin for begin, tokens in sequences])
    order = np.array_split(np.argsort(lengths, kind="stable"), BINS)
    rows, margins = [], []
    for part in order:
        span = f"{lengths[part].min()} to {lengths[part].max()}"
        values = [rms(each[part]) for each in (exact, floor["fp32"])]
        values += [rms(each[part]) for t in TYPES for each in (floor[t], shift[t] - exact)]
        rows.append([span, str(len(part)), *(f"{value:.2g}" for value in values)])
        mean = torch.tensor([round(float(lengths[part].mean()))])
        row = [span]
        for algo in BANDS.values():
            lower, upper = acceptance_band(mean, ALGORITHMS[algo], dtype=torch.float64)
            width = min(float(-lower), float(upper))
            row += [f"{width:.2g}", *(f"{width / rms(floor[t][part]):.1f}" for t in TYPES)]
        margins.append(row)
    head = ["length", "responses", "S, fp32", "floor, fp32"] + [
        f"{what}, {t}" for t in TYPES for what in ("floor", "error")
    ]
    margin_head = ["length"] + [
        text for name in BANDS for text in (f"{name}: half-width", *(f"over the floor, {t}" for t in TYPES))
    ]
    return markdown_table(head, rows), markdown_table(margin_head, margins)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=shipped_model(), help="folder of a model (default: the demo's)")
    parser.add_argument("--data", type=Path, help="parquet file with prompts (default: the demo's task)")
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps before S is measured")
    parser.add_argument("--lr", type=float, default=1e-4)
    arguments = parser.parse_args()
    of = "" if arguments.model == shipped_model() else " of another"
    chats = chats_of(arguments.data, arguments.problems)
    tables = measure(arguments.model, chats, arguments.steps, arguments.lr)
    for name, table in zip(("errors", "margins"), tables, strict=True):
        write_section(PAGE, name + of, table)


if __name__ == "__main__":
    main()
