"""Exact, addable sums of per-sequence quantities over fixed fine length bins.

Workers see one micro-batch of one rank at a time. A *sum* is what they can report without depending on that split. From
the sums of this module the driver computes the metrics of :mod:`fspo.diagnostics`, the length fairness of
:mod:`fspo.fairness.lre` and the calibration of the bands. Counts are exact integers (in float64, exact up to 2**53).
Sums of real numbers are float64 and agree between splits up to rounding.

The bins are fixed and much finer than those shown to a person. Coarser bins, of equal mass for example, can be formed
afterwards over any window of steps. The layout is defined here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from fspo.types import SequenceLossOutput

LAYOUT_VERSION: Final = 2
"""Stored with every record. It changes with FIELDS, FINE_LENGTH_EDGES and Z_EDGES; other layouts are refused."""

RATIO_LOG_CAP: Final = 20.0
"""exp(S) and the weight enter the sums as at most exp(20), so that one sequence cannot make a sum infinite."""

_BINS_PER_OCTAVE: Final = 8
_CELLS_PER_DECADE: Final = 16
_LARGEST_EDGE: Final = 2**17
_OPEN_END: Final = 2**62


def _fine_length_edges() -> torch.Tensor:
    own = list(range(1, 17))
    octaves = int(math.log2(_LARGEST_EDGE / 16))
    geometric = [round(16 * 2 ** (j / _BINS_PER_OCTAVE)) for j in range(1, octaves * _BINS_PER_OCTAVE + 1)]
    return torch.tensor(sorted({*own, 17, *geometric, _OPEN_END}), dtype=torch.int64)


FINE_LENGTH_EDGES: Final = _fine_length_edges()
"""K + 1 integer edges e: bin k holds the lengths e[k] <= L < e[k + 1]. Lengths 1 to 16 have a bin each, then the edges
grow by 2**(1/8) up to 2**17; the last bin is open-ended (its upper edge is a sentinel, 2**62)."""

_Z_MAGNITUDE_EDGES: Final = torch.logspace(-6.0, 2.0, 8 * _CELLS_PER_DECADE + 1, dtype=torch.float64)

ZERO_CELL: Final = _Z_MAGNITUDE_EDGES.numel() + 1
"""Index of the histogram cell that holds z == 0 exactly (every sequence of the first mini-batch after a rollout)."""

Z_EDGES: Final = torch.cat(
    [
        torch.tensor([-math.inf], dtype=torch.float64),
        -_Z_MAGNITUDE_EDGES.flip(0),
        torch.zeros(2, dtype=torch.float64),
        _Z_MAGNITUDE_EDGES,
        torch.tensor([math.inf], dtype=torch.float64),
    ]
)
"""H + 1 edges of the signed histogram of z = S / sqrt(L), symmetric about 0: cell h lies between Z_EDGES[h] and
Z_EDGES[h + 1]. There are sixteen cells per decade of |z| from 1e-6 to 1e2, two overflow cells at the ends, two cells
for 0 < |z| < 1e-6, and ZERO_CELL for z == 0 in the middle. A |z| equal to an edge lies in the cell further out."""

FIELDS: Final[tuple[str, ...]] = (
    "count",  # sequences with at least one response token
    "accepted",  # S inside the band, whatever the sign of A
    "clipped_high",  # S above the band and A > 0: gradient removed
    "clipped_low",  # S below the band and A < 0: gradient removed
    "overflow",  # log-weight above the log-ratio clamp s_max
    "truncated",  # response cut at the maximum length
    "truncated_accepted",
    "advantage_zero",  # A == 0 exactly: groups without dispersion
    "advantage_zero_accepted",
    "length",  # sum of L
    "length_sqrt",  # sum of sqrt(L)
    "S",
    "S_squared",
    "z",  # z = S / sqrt(L)
    "z_squared",
    "weight",  # the algorithm's unclipped weight: exp(S) or exp(S / L)
    "weight_squared",
    "weight_accepted",
    "ratio",  # exp(S), whatever the algorithm
    "ratio_squared",
    "ratio_accepted",
)

_COLUMN: Final = {name: index for index, name in enumerate(FIELDS)}
_K: Final = FINE_LENGTH_EDGES.numel() - 1
_H: Final = Z_EDGES.numel() - 1


def length_bin(length_B: torch.Tensor) -> torch.Tensor:
    """Index k of the fine length bin of each length.

    Args:
        length_B: Response lengths in tokens, at least 1.

    Returns:
        int64 tensor of the same shape, 0 <= k < K.
    """
    return torch.bucketize(length_B.to(torch.int64), FINE_LENGTH_EDGES.to(length_B.device), right=True) - 1


def z_cell(z_B: torch.Tensor) -> torch.Tensor:
    """Index h of the histogram cell (see Z_EDGES) of each finite z = S / sqrt(L)."""
    magnitude = torch.bucketize(z_B.abs().to(torch.float64), _Z_MAGNITUDE_EDGES, right=True).add_(1)
    return ZERO_CELL + z_B.sign().to(torch.int64) * magnitude


def sequence_values(
    output: SequenceLossOutput, truncated_B: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each sequence of a micro-batch adds to the sums.

    Args:
        output: What the policy loss returned, with a finite S in each row; rows with ``valid_B`` false (padding) are
            left out.
        truncated_B: bool, true where the response was cut at the maximum length; None means that none was.

    Returns:
        ``(length_B, z_B, values_BF)`` on the CPU, for the valid rows only: lengths (int64), z = S / sqrt(L) and the
        value of each of FIELDS (float64).
    """
    if truncated_B is None:
        truncated_B = torch.zeros_like(output.log_ratio_B)
    columns = (
        output.valid_B,
        output.log_ratio_B,
        output.length_B,
        output.weight_B,
        output.advantage_B,
        output.accepted_B,
        output.clipped_high_B,
        output.clipped_low_B,
        output.overflow_B,
        truncated_B,
    )
    # One stacked copy, because one transfer per column would cost ten device synchronisations per micro-batch.
    device = output.log_ratio_B.device
    stacked = torch.stack([c.detach().to(device=device, dtype=torch.float64) for c in columns]).cpu()
    _, s, length, weight, advantage, accepted, high, low, overflow, truncated = stacked[:, stacked[0] > 0].unbind(0)
    weight = weight.clamp(max=math.exp(RATIO_LOG_CAP))
    ratio = s.clamp(max=RATIO_LOG_CAP).exp()
    root = length.sqrt()
    z = s / root
    zero = (advantage == 0).to(torch.float64)
    values = {
        "count": torch.ones_like(s),
        "accepted": accepted,
        "clipped_high": high,
        "clipped_low": low,
        "overflow": overflow,
        "truncated": truncated,
        "truncated_accepted": truncated * accepted,
        "advantage_zero": zero,
        "advantage_zero_accepted": zero * accepted,
        "length": length,
        "length_sqrt": root,
        "S": s,
        "S_squared": s * s,
        "z": z,
        "z_squared": z * z,
        "weight": weight,
        "weight_squared": weight * weight,
        "weight_accepted": weight * accepted,
        "ratio": ratio,
        "ratio_squared": ratio * ratio,
        "ratio_accepted": ratio * accepted,
    }
    return length.to(torch.int64), z, torch.stack([values[name] for name in FIELDS], dim=1)


@dataclass(frozen=True, slots=True)
class SequenceSums:
    """Sums over a set of sequences, by fine length bin. Defined here.

    Attributes:
        sums_KF: float64 [K, F]; column f holds the sum of ``FIELDS[f]`` over the sequences of each length bin.
        hist_KH: int64 [K, H]; how many sequences of each length bin have z = S / sqrt(L) in each cell of Z_EDGES.

    Sets of sequences are joined with ``+``; ``sum(parts, SequenceSums.zeros())`` joins micro-batches, ranks or steps.
    """

    sums_KF: torch.Tensor
    hist_KH: torch.Tensor

    def __post_init__(self) -> None:
        for name, value, shape, dtype in (
            ("sums_KF", self.sums_KF, (_K, len(FIELDS)), torch.float64),
            ("hist_KH", self.hist_KH, (_K, _H), torch.int64),
        ):
            if tuple(value.shape) != shape or value.dtype != dtype:
                raise ValueError(
                    f"SequenceSums.{name} must be {dtype} of shape {shape}, got {value.dtype} of shape "
                    f"{tuple(value.shape)}; it was written by another layout than version {LAYOUT_VERSION}"
                )

    @classmethod
    def zeros(cls) -> SequenceSums:
        """The sums of no sequence."""
        return cls(torch.zeros(_K, len(FIELDS), dtype=torch.float64), torch.zeros(_K, _H, dtype=torch.int64))

    def add_(self, output: SequenceLossOutput, truncated_B: torch.Tensor | None = None) -> SequenceSums:
        """Add the sequences of one micro-batch in place; arguments as in :func:`sequence_values`."""
        length_B, z_B, values_BF = sequence_values(output, truncated_B)
        k = length_bin(length_B)
        self.sums_KF.index_add_(0, k, values_BF)
        self.hist_KH.view(-1).index_add_(0, k * _H + z_cell(z_B), torch.ones_like(k))
        return self

    def __add__(self, other: SequenceSums) -> SequenceSums:
        return SequenceSums(self.sums_KF + other.sums_KF, self.hist_KH + other.hist_KH)

    def column(self, name: str) -> torch.Tensor:
        """The sums of one field by fine length bin, float64 [K].

        Raises:
            KeyError: If ``name`` is not in FIELDS.
        """
        return self.sums_KF[:, _COLUMN[name]]

    def total(self, name: str) -> float:
        """The sum of one field over all lengths."""
        return float(self.column(name).sum())

    def cells(self) -> torch.Tensor:
        """The filled cells of the histogram, int64 [n, 3]: fine length bin, cell of Z_EDGES, number of sequences."""
        filled = self.hist_KH.nonzero()
        return torch.cat([filled, self.hist_KH[filled[:, 0], filled[:, 1]][:, None]], dim=1)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; see :meth:`from_state_dict`."""
        return {"layout": LAYOUT_VERSION, "sums_KF": self.sums_KF.clone(), "hist_KH": self.hist_KH.clone()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> SequenceSums:
        """Inverse of :meth:`state_dict`.

        Raises:
            ValueError: If the state was saved with another layout of fields and bins.
        """
        if state.get("layout") != LAYOUT_VERSION:
            raise ValueError(
                f"saved sums have layout {state.get('layout')!r}, this version of fspo reads {LAYOUT_VERSION}; "
                "delete them from the checkpoint to start the window of statistics again"
            )
        return cls(state["sums_KF"].clone(), state["hist_KH"].clone())
