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

import numpy as np
import torch
import torch.distributed as dist
import two_ranks
from batches import PROMPT, batch_of

from recipe.fspo.main import composed as compose

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


class Policy:
    """The recipe's worker around verl's FSDP engine, as a rank of the process group.

    ``tokens`` are this rank's sequences, ``mini_batch`` is the number of sequences of a mini-batch over all ranks.
    """

    def __init__(self, config: Any, folder: Path, tokens: list[torch.Tensor], mini_batch: int) -> None:
        from recipe.fspo.worker import FSPOWorker

        self.worker = FSPOWorker(config=config.actor_rollout_ref, role="actor")
        self.worker.init_model()
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
