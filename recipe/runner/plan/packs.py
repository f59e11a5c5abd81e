"""Packs of a step, simulated without verl: how full they are, and what the slowest rank has over the mean.

Each sequence, the longest first, goes to the part with the least work. verl's ``seqlen_balancing`` combines parts by
their differences (Karmarkar and Karp), which takes hundreds of times as long: ``python -m benchmarks.packs`` has its
numbers, and ``tests/unit/test_packs.py`` compares them.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence


def balanced(lengths: Sequence[int], parts: int, most: int) -> list[list[int]]:
    """The lengths of each part's sequences, at most ``most``; the work of a sequence is verl's estimate."""
    heap = [(0, part) for part in range(parts)]
    lists: list[list[int]] = [[] for _ in range(parts)]
    for length in sorted(lengths, reverse=True):
        work, part = heapq.heappop(heap)
        lists[part].append(length)
        if len(lists[part]) < most:
            heapq.heappush(heap, (work + 24576 * length + length**2, part))
    return lists


def fill_and_slowest(updates: Sequence[Sequence[Sequence[int]]], packs: int, budget: int) -> tuple[float, float]:
    """From the lengths on each rank in each update, and the packs of a rank in all updates: the used share of the
    budget, and the tokens of each update's slowest rank over the mean."""
    ranks, tokens = len(updates[0]), sum(sum(map(sum, of_ranks)) for of_ranks in updates)
    slowest = sum(max(map(sum, of_ranks)) for of_ranks in updates)
    return tokens / (packs * ranks * budget), slowest * ranks / tokens


@functools.lru_cache
def simulated(lengths: tuple[int, ...], mini_batch: int, ranks: int, budget: int) -> tuple[float, float]:
    """The same for lengths of a step, where every mini-batch is balanced over the ranks, which form as many packs."""
    updates, packs = [], 0
    for start in range(0, len(lengths), mini_batch):
        part = lengths[start : start + mini_batch]
        updates.append(of_ranks := balanced(part, ranks, -(-len(part) // ranks)))
        number = -(-max(map(sum, of_ranks)) // budget)
        while number < len(part) and any(
            max(map(sum, balanced(of_rank, number, len(part)))) > budget for of_rank in of_ranks
        ):
            number += 1
        packs += number
    return fill_and_slowest(updates, packs, budget)
