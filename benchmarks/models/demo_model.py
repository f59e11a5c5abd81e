"""The small supervised model that the demo starts from, and the seeded recipe that makes it.

It is a Qwen3 with a character tokenizer, trained from random weights on the training split of the demo's task. Only
response tokens count in the loss; batches are bucketed by length; the optimizer is AdamW with warm-up and cosine decay,
in fp32. There are two stages:

1. *skill*: the full working of every problem, until most are solved;
2. *habits*: a few steps on demonstrations of mixed quality, most of which forget once to borrow. Like a language model
   before reinforcement learning, the result *can* solve the problems, short and long, but is often careless. A slip
   hardly changes the length of the working, so lengths vary as much as the task's from the first step of the run on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.models.char_tokenizer import build_tokenizer
from recipe.math.data import offline_task
from recipe.math.data.offline_task import Division, draws

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

CONTEXT = 512
MAX_RESPONSE = 256
IGNORE = -100
CHECKSUMS = "SHA256SUMS"


class CarelessDivision(Division):
    """A division whose working can forget to borrow."""

    @property
    def slips(self) -> list[int]:
        """The subtractions, counted from 0, whose units digit has to borrow from the tens: 0 and 2 of ``150%44``."""
        values = range(self.dividend, self.divisor - 1, -self.divisor)
        return [step for step, value in enumerate(values) if value % 10 < self.divisor % 10]

    def slip(self, step: int) -> str:
        """The working that forgets the borrow of one subtraction and continues from there: ``116-44=072-44=028``.

        That result is 10 too large, so the answer is wrong unless the divisor is 5. The length hardly changes.
        """
        before = [self.dividend - self.divisor * (done + 1) for done in range(step)]
        rests = [*before, *range(self.dividend - self.divisor * (step + 1) + 10, -1, -self.divisor)]
        return f"-{self.divisor:02d}=".join(f"{rest:03d}" for rest in rests)


def careless(problem: Division) -> CarelessDivision:
    return CarelessDivision(problem.dividend, problem.divisor)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, apart from the versions of torch and transformers."""

    skill_steps: int = 1600
    habit_steps: int = 150
    batch_size: int = 32
    pool: int = 1024  # problems drawn at once and sorted by length, so that a batch has similar lengths
    skill_lr: float = 3e-3
    habit_lr: float = 3e-4
    careful_share: float = 0.2  # share of the demonstrations without a slip, in the habit stage
    warmup_steps: int = 50
    final_lr_share: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 0
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32


def shipped_model() -> Path:
    """The folder of the model in the package, made by ``train(Recipe())``."""
    return Path(offline_task.__file__).with_name("assets") / "demo_model"


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 in fp32 with random weights and tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config).float()


def demonstrate(problem: CarelessDivision, recipe: Recipe, rng: np.random.Generator) -> str:
    """A demonstration of the second stage: the right working, or one with a slip if the problem allows one."""
    slips = problem.slips
    is_careful = not slips or rng.random() < recipe.careful_share
    return problem.working if is_careful else problem.slip(slips[int(rng.integers(len(slips)))])


def batches(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, mixed: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, labels), right-padded, both (batch, length); prompt and padding are IGNORE in the labels."""
    rng = np.random.default_rng([recipe.seed, int(mixed)])
    problems = map(careless, draws(rng, "train"))
    while True:
        pool = [(p, demonstrate(p, recipe, rng) if mixed else p.working) for p in islice(problems, recipe.pool)]
        pool.sort(key=lambda pair: len(pair[1]))
        buckets = [pool[i : i + recipe.batch_size] for i in range(0, recipe.pool, recipe.batch_size)]
        for bucket in rng.permutation(len(buckets)):
            yield collate(buckets[bucket], tokenizer)


def collate(
    pairs: Sequence[tuple[CarelessDivision, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of problems with their responses; see :func:`batches`."""
    prompts = [prompt_ids(tokenizer, problem) for problem, _ in pairs]
    responses = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for _, text in pairs]
    both = [*zip(prompts, responses, strict=True)]
    tokens = [torch.tensor(prompt + response) for prompt, response in both]
    labels = [torch.tensor([IGNORE] * len(prompt) + response) for prompt, response in both]
    return (
        pad_sequence(tokens, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence(labels, batch_first=True, padding_value=IGNORE),
    )


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Division) -> list[int]:
    """Token ids of the prompt as the trainer and vLLM see it."""
    chat = [{"role": "user", "content": problem.question}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def response_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats) of the labelled tokens."""
    # No attention mask: padding lies to the right, where a causal model cannot see it.
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)


def learning_rate(peak: float, step: int, steps: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine from ``peak`` to ``final_lr_share`` of it."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * min((step + 1) / recipe.warmup_steps, recipe.final_lr_share + (1 - recipe.final_lr_share) * cosine)


def train(recipe: Recipe) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, dict[str, float]]:
    """Run the recipe; returns the model, its tokenizer, and the mean loss of each stage's last 50 steps."""
    tokenizer = build_tokenizer(offline_task.VOCABULARY, CONTEXT)
    model = build_model(recipe, tokenizer)
    final = {"skill": run_stage(model, tokenizer, recipe, recipe.skill_steps, recipe.skill_lr, mixed=False)}
    final["habit"] = run_stage(model, tokenizer, recipe, recipe.habit_steps, recipe.habit_lr, mixed=True)
    return model, tokenizer, final


def run_stage(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, steps: int, peak_lr: float, mixed: bool
) -> float:
    """Train ``model`` in place for one stage with a new optimizer; returns the mean loss of the last 50 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay)
    losses = []
    for step, (tokens, labels) in enumerate(islice(batches(recipe, tokenizer, mixed), steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(peak_lr, step, steps, recipe)
        loss = response_loss(model, tokens, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-50:]) / len(losses[-50:])


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a model folder, except the list of checksums itself."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write model, tokenizer and checksums to a new folder; it appears only when it is complete.

    Raises:
        OSError: if ``out`` is a folder with files.
    """
    unfinished = out.with_name(f".{out.name}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    lines = [f"{digest}  {name}\n" for name, digest in checksums(unfinished).items()]
    (unfinished / CHECKSUMS).write_text("".join(lines), encoding="ascii")
    unfinished.rename(out)


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Division], temperature: float
) -> float:
    """Share of the problems solved, with one response each; ``temperature`` 0 is greedy."""
    torch.manual_seed(0)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    solved = 0.0
    for start in range(0, len(problems), 64):
        chunk = problems[start : start + 64]
        prompts = tokenizer.pad({"input_ids": [prompt_ids(tokenizer, p) for p in chunk]}, return_tensors="pt")
        output = model.generate(**prompts, max_new_tokens=MAX_RESPONSE, **(sampling if temperature else {}))
        texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        solved += sum(offline_task.score_answer(text, p.answer) for text, p in zip(texts, chunk, strict=True))
    return solved / len(problems)


def make(out: Path) -> str:
    """Train the model, write it to a new folder, and say its losses and accuracies."""
    recipe = Recipe()
    model, tokenizer, losses = train(recipe)
    save(model, tokenizer, out)
    problems = offline_task.distinct(200, recipe.seed, "test")
    figures = {f"loss_{stage}": loss for stage, loss in losses.items()}
    figures |= {f"accuracy_T{t}": accuracy(model, tokenizer, problems, float(t)) for t in (0, 1)}
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
