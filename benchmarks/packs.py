"""How full the packs of the 8B job are, and how long its slowest rank works: ``python -m benchmarks.packs``.

Prints the table of docs/performance.md: verl's balancing of a whole rollout batch beside this recipe's of every
mini-batch, by the functions that form the packs in a run. Lengths are drawn at random, as those of a base model that
learns to reason may be spread; no model runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches

from fspo.markdown import markdown_table
from recipe.runner.packs import rows_of_ranks
from recipe.runner.plan.packs import fill_and_slowest
from recipe.runner.plan.step_time import response_lengths


@dataclass(frozen=True)
class Job:
    """Of ``experiment=qwen3_8b``: prompts, responses to each, mini-batches, tokens of a pack, longest response."""

    prompts: int = 512
    responses: int = 16
    mini_batches: int = 4
    budget: int = 20480
    longest: int = 8192


def draw_lengths(job: Job, mean: float) -> list[int]:
    """Tokens of each sequence: the planner's responses, and prompts around 170 tokens."""
    response = response_lengths(job.prompts, job.responses, mean, job.longest).reshape(job.prompts, -1)
    random = np.random.default_rng(0)
    random.normal(size=job.prompts * (1 + job.responses))  # those of the responses
    prompt = random.lognormal(math.log(170), 0.45, (job.prompts, 1)).clip(60, 1500)
    return [int(tokens) for tokens in (prompt.astype(int) + response.astype(int)).flatten()]


def pack(of_ranks: Sequence[Sequence[int]], budget: int) -> int:
    """Packs of each rank, as many on all: by verl's function, which ranks call together until all are within."""
    batches = []
    for lengths in of_ranks:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        ids = torch.nested.nested_tensor_from_jagged(torch.zeros(int(offsets[-1]), dtype=torch.int8), offsets)
        batches.append(TensorDict({"input_ids": ids}, batch_size=len(lengths)))
    packs, most = 0, 1
    while packs < most:
        packs = most
        most = max(len(rearrange_micro_batches(batch, budget, min_num_micro_batch=packs)[0]) for batch in batches)
    return packs


def row(job: Job, lengths: list[int], ranks: int, way: str) -> list[str]:
    """A line of the table."""
    size = len(lengths) // job.mini_batches
    if way == "verl":
        workload = calculate_workload(torch.tensor(lengths)).tolist()
        parts = get_seqlen_balanced_partitions(workload, ranks, equal_size=True)
    else:
        parts = rows_of_ranks(lengths, size, ranks)
    tokens = [[lengths[index] for index in part] for part in parts]
    starts = range(0, len(tokens[0]), size // ranks)
    of_updates = [[part[start : start + size // ranks] for part in tokens] for start in starts]
    updates = [pack(of_ranks, job.budget) for of_ranks in of_updates]
    fill, slowest = fill_and_slowest(of_updates, sum(updates), job.budget)
    inferred, packs = ([tokens], pack(tokens, job.budget)) if way == "verl" else (of_updates, sum(updates))
    full, _ = fill_and_slowest(inferred, packs, job.budget)
    cells = [str(ranks), way, str(packs), f"{full:.3f}"]
    return [*cells, str(sum(updates)), f"{fill:.3f}", f"{slowest:.3f}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mean", type=float, default=2000, help="mean length of a response in tokens")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    args = parser.parse_args()
    lengths = draw_lengths(Job(), args.mean)
    columns = ["ranks", "balanced by", "packs inferred", "their fill"]
    columns += ["packs updated", "fill", "slowest rank"]
    ways = ("verl", "this recipe")
    print(markdown_table(columns, [row(Job(), lengths, ranks, way) for ranks in args.ranks for way in ways]))
