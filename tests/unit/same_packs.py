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

import torch
import torch.distributed as dist
import two_ranks
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from recipe.fspo.job import compose
from recipe.fspo.recorder import RECORDER
from recipe.fspo.worker import FSPOWorker

SEQUENCES, MINI_BATCH, PROMPT, LONGEST, BUDGET = 48, 16, 4, 40, 96
ACTOR = "actor_rollout_ref.actor"


def split_k(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A matrix product in as many parts as its number of rows asks for, each rounded: what kernels of GPUs do."""
    parts = 1 + input.shape[-2] % 5
    products = [a @ b.T for a, b in zip(input.chunk(parts, -1), weight.chunk(parts, -1), strict=True)]
    total = sum(products[1:], start=products[0])
    return total if bias is None else total + bias


def sequences(rank: int, ranks: int) -> TensorDict:
    """This rank's part of a batch whose mini-batches are of very different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=generator).tolist()
    rows = [torch.randint(0, 512, (PROMPT + length,), generator=generator) for length in lengths]
    advantages = torch.randn(SEQUENCES, generator=generator)
    mine = [i for i in range(SEQUENCES) if i % ranks == rank]
    columns = {
        "prompts": [rows[i][:PROMPT] for i in mine],
        "responses": [rows[i][PROMPT:] for i in mine],
        "input_ids": [rows[i] for i in mine],
        "position_ids": [torch.arange(len(rows[i])) for i in mine],
        "response_mask": [torch.ones(lengths[i], dtype=torch.int64) for i in mine],
        "loss_mask": [torch.ones(lengths[i], dtype=torch.int64) for i in mine],
        "advantages": [advantages[i].expand(lengths[i]) for i in mine],
    }
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()}
    return TensorDict(nested, batch_size=len(mine))


def largest_by_mini_batch(worker: FSPOWorker, ulysses: int, asked: dict[str, int]) -> list[float] | None:
    """Largest |S| of each mini-batch."""
    data = sequences(dist.get_rank() // ulysses, 2 // ulysses)
    question = data.clone()
    tu.assign_non_tensor(question, calculate_entropy=True, compute_loss=False, temperature=1.0, **asked)
    answer = [worker.compute_log_prob(question)]
    if ulysses > 1:  # verl hands on what the first rank of a group answers, through its queue
        dist.broadcast_object_list(answer, src=0)
    data["old_log_probs"] = response_from_nested(answer[0]["log_probs"], data["response_mask"])
    RECORDER.begin_update(None, step=1, sequences=True)
    of_update = {"global_batch_size": MINI_BATCH, "mini_batch_size": MINI_BATCH, "epochs": 1, "seed": 1}
    tu.assign_non_tensor(
        data, calculate_entropy=False, dataloader_kwargs={"shuffle": False}, temperature=1.0, **of_update
    )
    worker.update_actor(data)
    recorded = worker.pop_mini_batches()
    return None if recorded is None else [float(abs(mini_batch.sequences[0]).max()) for mini_batch in recorded]


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
    worker = FSPOWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    for module in worker.actor.engine.module.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    worker.record(run_dir=folder)
    torch.nn.functional.linear = split_k
    for way, asked in (("as the update", {"mini_batch_size": MINI_BATCH}), ("as verl", {})):
        if (largest := largest_by_mini_batch(worker, ulysses, asked)) is not None:
            line = json.dumps({"rank": rank, "ulysses": ulysses, "way": way, "largest": largest})
            print(f"{line}\n", end="", flush=True)  # in one write: two ranks share the pipe


if __name__ == "__main__":
    for size in (1, 2):
        two_ranks.start(sys.argv[1], rank_of_two, size)
