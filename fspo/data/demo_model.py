"""The small supervised model that the demo starts from, and the seeded recipe that makes it.

A Qwen3 with a character tokenizer, trained from random weights on the embedded task's training split: response tokens
only in the loss, length-bucketed batches, AdamW with warm-up and cosine, fp32. The recipe stops while the model still
errs on more than half of its samples, so that reinforcement learning has something to improve.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fspo.data.offline_task import ALPHABET, Problem, sample_problems, score_answer, write_dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

CONTEXT = 512
MAX_RESPONSE = 256
IGNORE = -100
CHECKSUMS = "SHA256SUMS"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, beside the versions of torch and transformers."""

    steps: int = 1000
    batch_size: int = 32
    pool: int = 1024  # problems drawn at once and sorted by length, so that a batch holds like lengths
    lr: float = 3e-3
    warmup_steps: int = 50
    final_lr_share: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 0
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.pool % self.batch_size:
            raise ValueError(f"pool ({self.pool}) must be a multiple of batch_size ({self.batch_size})")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")


def shipped_model() -> Path:
    """The folder of the model that the package carries, made by ``train(Recipe())``."""
    return Path(str(files("fspo.data"))) / "assets" / "demo_model"


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 in fp32 with random weights; its embedding and output matrices are one."""
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


def batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, labels), right-padded, both (batch, length); prompt and padding are IGNORE in the labels."""
    rng = np.random.default_rng(recipe.seed)
    problems = sample_problems(rng, "train")
    while True:
        pool = sorted(islice(problems, recipe.pool), key=lambda problem: len(problem.working))
        buckets = [pool[i : i + recipe.batch_size] for i in range(0, recipe.pool, recipe.batch_size)]
        for bucket in rng.permutation(len(buckets)):
            yield collate(buckets[bucket], tokenizer)


def collate(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    prompts = [prompt_ids(tokenizer, problem) for problem in problems]
    responses = [
        tokenizer.encode(problem.working, add_special_tokens=False) + [tokenizer.eos_token_id] for problem in problems
    ]
    length = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
    tokens = torch.full((len(problems), length), tokenizer.pad_token_id)
    labels = torch.full((len(problems), length), IGNORE)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = len(prompt), len(prompt) + len(response)
        tokens[row, :end] = torch.tensor(prompt + response)
        labels[row, start:end] = torch.tensor(response)
    return tokens, labels


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    chat = [{"role": "user", "content": problem.question}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def response_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats) of the labelled tokens."""
    # No attention mask: padding lies to the right, where a causal model cannot see it.
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
