"""``python same_packs.py FOLDER``: S of an update that moves nothing, on two gloo ranks, under a kernel that rounds by
the number of a pack's tokens.

A process of its own, which forks: run by test_packs.py. The recipe's worker, verl's engine and optimizer with the 8B
job's settings and a learning rate of 0, a small model in bf16. Prints a JSON object for every rank that speaks, Ulysses
size and way of inferring: the largest |S| of each mini-batch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import two_ranks

from benchmarks.gpu_check.engine import PROMPT, Policy
from recipe.fspo.job import compose

SEQUENCES, MINI_BATCH, LONGEST, BUDGET = 48, 16, 40, 96
ACTOR = "actor_rollout_ref.actor"


def split_k(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A matrix product in as many parts as its number of rows asks for, each rounded: what kernels of GPUs do."""
    parts = 1 + input.shape[-2] % 5
    products = [a @ b.T for a, b in zip(input.chunk(parts, -1), weight.chunk(parts, -1), strict=True)]
    total = sum(products[1:], start=products[0])
    return total if bias is None else total + bias


def sequences(rank: int, ranks: int) -> list[torch.Tensor]:
    """This rank's part of a batch whose mini-batches are of very different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=generator).tolist()
    rows = [torch.randint(0, 512, (PROMPT + length,), generator=generator) for length in lengths]
    return rows[rank::ranks]


class Spread(Policy):
    """A policy of which each sequence may be spread over ranks."""

    def answer(self, question: Any) -> Any:
        answers = [super().answer(question)]
        if self.worker.config.actor.ulysses_sequence_parallel_size > 1:
            dist.broadcast_object_list(answers, src=0)  # verl hands on what the first rank of a group answers
        return answers[0]


def rank_of_two(rank: int, folder: str, ulysses: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ulysses}", rank=rank, world_size=2)
    config = compose(
        [
            "experiment=qwen3_8b",
            f"actor_rollout_ref.model.path={folder}",
            "actor_rollout_ref.model.override_config.attn_implementation=sdpa",  # flash-attn is not installed
            "+actor_rollout_ref.model.load_tokenizer=false",
            f"{ACTOR}.fsdp_config.use_torch_compile=false",
            f"{ACTOR}.optim.lr=0",
            f"{ACTOR}.optim.total_training_steps=1",
            f"{ACTOR}.ppo_max_token_len_per_gpu={BUDGET}",
            f"{ACTOR}.ulysses_sequence_parallel_size={ulysses}",
        ]
    )
    policy = Spread(config, Path(folder), sequences(rank // ulysses, 2 // ulysses), MINI_BATCH)
    for module in policy.worker.actor.engine.module.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    torch.nn.functional.linear = split_k
    for way, same_packs in (("as the update", True), ("as verl", False)):
        if largest := policy.update(policy.log_probs(same_packs)):
            line = json.dumps({"rank": rank, "ulysses": ulysses, "way": way, "largest": largest})
            print(f"{line}\n", end="", flush=True)  # in one write: two ranks share the pipe


if __name__ == "__main__":
    for size in (1, 2):
        two_ranks.start(sys.argv[1], rank_of_two, size)
