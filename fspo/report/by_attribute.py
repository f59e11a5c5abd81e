"""Acceptance by other attributes than length, of runs that recorded their sequences (``fspo.record_sequences=true``).

Difficulty is the mean reward of a response's group (the responses to one prompt in one step), reward dispersion the
standard deviation of its rewards. The attributes and their bins are our own.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from fspo.fairness.lre import length_reweighting_error
from fspo.records import sequence_lines
from fspo.report.groups import RunGroup
from fspo.report.runs import Array, Run
from fspo.report.tables import NOT_RECORDED, Table, group_heads, show_lre

_EDGES: Final = {"difficulty": tuple(i / 8 for i in range(1, 8)), "reward dispersion": (1e-9, 0.125, 0.25, 0.375, 0.5)}
_LABELS: Final = {
    name: [
        f"below {edges[0]:g}",
        *(f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)),
        f"{edges[-1]:g} or more",
    ]
    for name, edges in _EDGES.items()
}


def _mini_batches(run: Run) -> Iterator[tuple[dict[str, list[str]], list[int]]]:
    """By attribute the label, and acceptance (0 or 1), of the sequences of every mini-batch but the first of a step."""
    lines = [line for line in sequence_lines(run.path, run.problems) if "uid" in line]
    for _, of_step in itertools.groupby(lines, key=lambda line: line["step"]):
        step = list(of_step)
        rewards: dict[str, dict[str, float]] = defaultdict(dict)  # by prompt and uid; an epoch repeats a uid
        for line in step:
            for uid, reward in zip(line["uid"], line["reward"], strict=True):
                rewards[uid.split("_")[0]][uid] = reward
        for line in step:
            if line["minibatch"] > 0:
                groups = [list(rewards[uid.split("_")[0]].values()) for uid in line["uid"]]
                values_by_name = {
                    "difficulty": [statistics.fmean(group) for group in groups],
                    "reward dispersion": [statistics.pstdev(group) for group in groups],
                }
                labels = {
                    name: [_LABELS[name][bisect_right(_EDGES[name], value)] for value in values]
                    for name, values in values_by_name.items()
                }
                labels["truncation"] = ["truncated" if truncated else "ended" for truncated in line["truncated"]]
                yield labels | {"data source": line["data_source"]}, line["accepted"]


def attribute_table(groups: Sequence[RunGroup]) -> Table | None:
    """Debiased LRE over each attribute's bins, and acceptance in each bin, by group.

    An attribute whose sequences all lie in one bin has no rows; None if no attribute has any.
    """
    recorded = [[part for run in group.runs for part in _mini_batches(run)] for group in groups]
    rows = []
    for attribute in dict.fromkeys(name for parts in recorded for labels, _ in parts for name in labels):
        seen = {label for parts in recorded for labels, _ in parts for label in labels[attribute]}
        order = [label for label in _LABELS.get(attribute, sorted(seen)) if label in seen]
        if len(order) < 2:  # one acceptance rate, which the final numbers have
            continue
        counts = [[_count(labels[attribute], accepted, order) for labels, accepted in parts] for parts in recorded]
        arrays = [np.array(part).reshape(-1, 2, len(order)) for part in counts]
        errors = [length_reweighting_error(part[:, 0], part[:, 1]) if part.size else None for part in arrays]
        cells = [f"{show_lre(e)}, noise floor {e.noise_floor:.3f}" if e else NOT_RECORDED for e in errors]
        rows.append((f"{attribute}: LRE", "debiased, symmetric acceptance", cells))
        for place, label in enumerate(order):
            sums = [part[:, :, place].sum(0) for part in arrays]
            rows.append((label, attribute, [f"{a / n:.1%} of {n:.0f}" if n else "(no sequences)" for a, n in sums]))
    return Table(group_heads(groups), rows) if rows else None


def _count(label_B: list[str], accepted_B: list[int], order: list[str]) -> list[Array]:
    place_B = [order.index(label) for label in label_B]
    return [np.bincount(place_B, weights, len(order)).astype(float) for weights in (accepted_B, None)]
