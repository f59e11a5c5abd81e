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


@dataclass(frozen=True)
class Job:
    """Of ``experiment=qwen3_8b``: prompts, responses to each, mini-batches, tokens of a pack, longest response."""

    prompts: int = 512
    responses: int = 16
    mini_batches: int = 4
    budget: int = 20480
    longest: int = 8192


def draw_lengths(job: Job, mean: float, seed: int = 0) -> list[int]:
    """Tokens of each sequence: log-normal responses, half of the variance between prompts, cut at the longest."""
    rng = np.random.default_rng(seed)
    between, within = rng.normal(0, 0.5, (job.prompts, 1)), rng.normal(0, 0.5, (job.prompts, job.responses))
    response = np.exp(between + within)
    low, high = 1.0, 1e5
    for _ in range(60):  # the factor that gives the mean
        middle = math.sqrt(low * high)
        low, high = (middle, high) if np.minimum(response * middle, job.longest).mean() < mean else (low, middle)
    prompt = np.clip(rng.lognormal(math.log(170), 0.45, (job.prompts, 1)), 60, 1500).astype(int)
    total = prompt + np.clip(response * low, 1, job.longest).astype(int)
    return [int(tokens) for tokens in total.flatten()]


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
    slowest = sum(max(sum(part) for part in of_ranks) for of_ranks in of_updates) / (sum(lengths) / ranks)
    if way == "verl":
        sequences, inferred = len(lengths), pack(tokens, job.budget)
    else:
        sequences, inferred = len(lengths) - size, sum(updates[1:])
    fill = sum(lengths) / (sum(updates) * ranks * job.budget)
    return [str(ranks), way, str(sequences), str(inferred), str(sum(updates)), f"{fill:.3f}", f"{slowest:.3f}"]


def table(job: Job, mean: float, ranks: Sequence[int]) -> str:
    """Both ways for every number of ranks, in Markdown."""
    lengths = draw_lengths(job, mean)
    columns = ["ranks", "balanced by", "sequences inferred", "packs inferred", "packs updated", "fill", "slowest rank"]
    ways = ("verl", "this recipe")
    return markdown_table(columns, [row(job, lengths, number, way) for number in ranks for way in ways])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mean", type=float, default=2000, help="mean length of a response in tokens")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    args = parser.parse_args()
    print(table(Job(), args.mean, args.ranks))
