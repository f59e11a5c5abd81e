"""Fairness by other attributes than length: the same sums and errors over the bins of any attribute of a sequence.

The paper names this as future work; the attributes, their bins and the metrics are defined here. A run logs those of
:data:`NAMES` that its setting ``fspo.attributes`` lists. Your own analysis may define any other :class:`Attribute`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from fspo.acceptance import acceptance_counts
from fspo.fairness import length_reweighting_error
from fspo.sums import FIELDS, sequence_values

if TYPE_CHECKING:
    from fspo.types import SequenceLossOutput

_DIFFICULTY_EDGES: Final = tuple(i / 8 for i in range(1, 8))
_DISPERSION_EDGES: Final = (1e-9, 0.125, 0.25, 0.375, 0.5)


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of a sequence: its name in the names of metrics, and a short label for each bin, in order."""

    name: str
    labels: tuple[str, ...]


def _labels(edges: Sequence[float]) -> tuple[str, ...]:
    inner = [f"{low:g}_to_{high:g}" for low, high in itertools.pairwise(edges)]
    return (f"below_{edges[0]:g}", *inner, f"from_{edges[-1]:g}")


DIFFICULTY: Final = Attribute("difficulty", _labels(_DIFFICULTY_EDGES))
"""Mean reward of the prompt's group, for rewards in [0, 1]: bins of an eighth, hard prompts first."""

REWARD_DISPERSION: Final = Attribute("reward_dispersion", _labels(_DISPERSION_EDGES))
"""Standard deviation of the rewards in the prompt's group; the first bin holds groups without dispersion."""

TRUNCATED: Final = Attribute("truncated", ("ended", "truncated"))
"""Whether the response was cut at the maximum length."""

STALENESS: Final = Attribute("staleness", ("0", "1", "2", "3", "4_or_more"))
"""Policy versions between the one that sampled the response and the newest before its update, rounded down."""


NAMES: Final = ("difficulty", "reward_dispersion", "truncated", "data_source", "staleness")
"""The attributes that :func:`bin_batch` knows; the bins of ``data_source`` are the sources in the batch."""


def group_mean_and_std(reward_B: torch.Tensor, group_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and (population) standard deviation of the rewards of each sequence's group, by sequence.

    Args:
        reward_B: Reward of each sequence.
        group_B: Any integer that names the group (prompt) of each sequence.
    """
    _, index_B = torch.unique(group_B, return_inverse=True)
    reward = reward_B.to(torch.float64)
    size_G = torch.bincount(index_B).to(torch.float64)
    mean_B = (torch.bincount(index_B, reward) / size_G)[index_B]
    variance_G = torch.bincount(index_B, (reward - mean_B) ** 2) / size_G
    return mean_B, variance_G.sqrt()[index_B]


def _bin(value_B: torch.Tensor, edges: Sequence[float]) -> torch.Tensor:
    """Bin of each value; one equal to an edge belongs to the bin above it."""
    if bool(value_B.isnan().any()):
        raise ValueError("a reward is nan: it has no bin")
    return torch.bucketize(value_B, torch.tensor(edges, dtype=torch.float64), right=True)


def bin_batch(
    names: Sequence[str],
    *,
    reward_B: torch.Tensor,
    group_B: torch.Tensor,
    truncated_B: torch.Tensor,
    data_source_B: Sequence[str],
    staleness_B: torch.Tensor,
) -> tuple[tuple[Attribute, ...], torch.Tensor]:
    """The attributes ``names`` of a batch, and the bin of every sequence by each of them.

    Args:
        names: Of :data:`NAMES`.
        reward_B: Reward of each sequence; the bins of ``difficulty`` and ``reward_dispersion`` are made for [0, 1].
        group_B: Any integer that names the group (prompt) of each sequence; groups must be whole.
        truncated_B: bool, true where the response was cut at the maximum length.
        data_source_B: Name of the data set that each prompt comes from.
        staleness_B: Staleness of each sequence.

    Returns:
        ``(attributes, bin_BA)``: int64 [B, number of attributes].

    Raises:
        ValueError: For a name that is not one of :data:`NAMES`, or a reward that is nan.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"attribute {unknown[0]!r} is not known; choose from {', '.join(NAMES)}")
    mean_B, std_B = group_mean_and_std(reward_B, group_B)
    binned: dict[str, tuple[Attribute, torch.Tensor]] = {
        "difficulty": (DIFFICULTY, _bin(mean_B, _DIFFICULTY_EDGES)),
        "reward_dispersion": (REWARD_DISPERSION, _bin(std_B, _DISPERSION_EDGES)),
        "truncated": (TRUNCATED, truncated_B.to(torch.int64)),
        "staleness": (STALENESS, staleness_B.to(torch.int64).clamp(max=len(STALENESS.labels) - 1)),
    }
    if "data_source" in names:
        sources = sorted(set(data_source_B))
        index_B = torch.tensor([sources.index(source) for source in data_source_B], dtype=torch.int64)
        binned["data_source"] = (Attribute("data_source", tuple(sources)), index_B)
    chosen = [binned[name] for name in names]
    return tuple(attribute for attribute, _ in chosen), torch.stack([bin_B for _, bin_B in chosen], dim=1)


@dataclass(frozen=True, slots=True)
class AttributeSums:
    """Sums over sequences by bin of an attribute: float64 [bins, F], columns as in :data:`fspo.sums.FIELDS`."""

    attribute: Attribute
    sums_GF: torch.Tensor

    @classmethod
    def zeros(cls, attribute: Attribute) -> AttributeSums:
        """The sums of no sequence."""
        return cls(attribute, torch.zeros(len(attribute.labels), len(FIELDS), dtype=torch.float64))

    def add_(
        self, output: SequenceLossOutput, bin_B: torch.Tensor, truncated_B: torch.Tensor | None = None
    ) -> AttributeSums:
        """Add one micro-batch in place, except its padding; ``bin_B`` holds the bin of each row.

        Raises:
            ValueError: If ``bin_B`` does not have one entry per row, or as in :func:`fspo.sums.sequence_values`.
        """
        if bin_B.shape != output.valid_B.shape:
            raise ValueError(
                f"bin_B has shape {tuple(bin_B.shape)}, expected {tuple(output.valid_B.shape)}: one entry per sequence"
            )
        _, _, values_BF = sequence_values(output, truncated_B)
        self.sums_GF.index_add_(0, bin_B.cpu()[output.valid_B.cpu()], values_BF)
        return self

    def __add__(self, other: AttributeSums) -> AttributeSums:
        if other.attribute != self.attribute:
            raise ValueError(f"cannot add sums by {other.attribute.name!r} to sums by {self.attribute.name!r}")
        return AttributeSums(self.attribute, self.sums_GF + other.sums_GF)


def attribute_metrics(parts: Sequence[AttributeSums]) -> dict[str, float]:
    """Acceptance by the attribute's bins and its error, under the names of docs/metrics.md.

    Args:
        parts: Sums by one attribute, of each mini-batch but the first of its rollout batch.

    Returns:
        Metrics by name; bins without sequences and undefined values are absent.

    Raises:
        ValueError: If there is no mini-batch.
    """
    if not parts:
        raise ValueError("attribute_metrics needs the sums of at least one mini-batch")
    attribute = parts[0].attribute
    counts = acceptance_counts(np.stack([part.sums_GF.numpy() for part in parts]))
    error = length_reweighting_error(counts.accepted, counts.total, resamples=200)
    head = f"fspo/by_{attribute.name}"
    total_G: npt.NDArray[np.float64] = counts.total.sum(0)
    metrics = {
        f"{head}/lre": error.lre,
        f"{head}/lre_debiased": error.debiased.value,
        f"{head}/noise_floor": error.noise_floor,
    }
    for label, rate, count in zip(attribute.labels, error.rate_K, total_G, strict=True):
        if count > 0:
            metrics |= {f"{head}/accept/{label}": float(rate), f"{head}/count/{label}": float(count)}
    sums_GF = np.sum([part.sums_GF.numpy() for part in parts], axis=0)
    z_G, square_G = (sums_GF[:, FIELDS.index(name)] for name in ("z", "z_squared"))
    for label, count, z, square in zip(attribute.labels, total_G, z_G, square_G, strict=True):
        if count > 0:
            metrics[f"{head}/z_std/{label}"] = max(square / count - (z / count) ** 2, 0.0) ** 0.5
    return {name: value for name, value in metrics.items() if np.isfinite(value)}
