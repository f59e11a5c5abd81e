"""Which responses of a batch are kept for reading (a run folder's samples.jsonl): some of every length and verdict."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def spread(columns: Sequence[Sequence[Hashable] | npt.NDArray[Any]], n: int, seed: int | Sequence[int]) -> list[int]:
    """Choose rows that show every value of every column about equally often. Defined here.

    One row after the other: the one whose values have been shown least so far, summed over the columns; of several the
    first in an order drawn from the seed. Rare values are thus shown far more often than they occur: shares among the
    chosen rows say nothing about the batch.

    Args:
        columns: Values by row [B], at least one column.
        n: How many rows to choose, at most B.
        seed: As numpy.random.default_rng takes it.

    Returns:
        Numbers of the rows, in the order in which they were chosen.
    """
    codes = []
    for column in columns:
        number: dict[Hashable, int] = {}
        codes.append(np.array([number.setdefault(value, len(number)) for value in column], np.int64))
    left = np.random.default_rng(seed).permutation(len(codes[0]))
    shown = [np.zeros(len(code), np.int64) for code in codes]
    chosen: list[int] = []
    while len(left) and len(chosen) < n:
        times = sum(count[code[left]] for count, code in zip(shown, codes, strict=True))
        row = int(left[np.argmin(times)])
        left = left[left != row]
        chosen.append(row)
        for count, code in zip(shown, codes, strict=True):
            count[code[row]] += 1
    return chosen


def quarters(length_B: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The quarter of the lengths that each belongs to, 0 to 3; equal lengths are in one quarter."""
    lengths = np.asarray(length_B, dtype=np.float64)
    return np.searchsorted(np.quantile(lengths, [0.25, 0.5, 0.75]), lengths) if lengths.size else np.zeros(0, np.int64)


def is_right(info: Mapping[str, Any], reward: Any) -> bool:
    """Whether a response counts as right: ``acc`` above 0, or where the reward reports no such number, the reward."""
    verdict = info.get("acc")
    if not isinstance(verdict, (int, float, np.number)):
        verdict = reward
    return bool(isinstance(verdict, (int, float, np.number)) and verdict > 0)


def sample_line(kind: str, step: int, info: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """One line of samples.jsonl, as JSON can hold it; of what the reward reported (``info``) acc and status."""
    told = facts | {name: info[name] for name in ("acc", "status") if info.get(name) is not None}
    return {"step": step, "kind": kind} | {name: _plain(value) for name, value in told.items()}


def _plain(value: Any) -> str | float | None:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, (int, str)) else str(value)


def validation_samples(
    generations: tuple[Sequence[str], Sequence[str], Sequence[float]],
    infos: Mapping[str, Sequence[Any]],
    count: int,
    seed: int,
    step: int,
) -> Iterator[dict[str, Any]]:
    """Lines of ``samples.jsonl`` for one validation; L is known where the reward reports ``response_length``.

    Args:
        generations: Prompts, responses and scores, as verl hands them to its loggers.
        infos: What the reward function returned besides, as verl collects it: a list for each name.
        count: How many responses to keep.
    """
    prompts, responses, scores = generations
    names = [name for name, values in infos.items() if len(values) == len(prompts)]
    info_B = [{name: infos[name][row] for name in names} for row in range(len(prompts))]
    lengths = [info.get("response_length") for info in info_B]
    length_B = [length if isinstance(length, (int, float, np.number)) else None for length in lengths]
    right_B = [is_right(info, score) for info, score in zip(info_B, scores, strict=True)]
    # Where the tokens are not counted, characters are good enough to spread by.
    shown_B = [float(len(text) if n is None else n) for text, n in zip(responses, length_B, strict=True)]
    for sample, row in enumerate(spread([quarters(shown_B), right_B, prompts], count, (seed, step))):
        yield sample_line(
            "validation", step, info_B[row], sample=sample, prompt=prompts[row], response=responses[row],
            reward=float(scores[row]), L=length_B[row],
        )  # fmt: skip
