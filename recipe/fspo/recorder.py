"""What the policy loss of one worker process shares with the trainer: sums out, band state in.

verl averages what a policy loss returns as metrics over micro-batches, ranks and mini-batches, unweighted. Exact
figures by length, and per mini-batch, therefore travel beside verl's metrics: the loss adds each micro-batch to the
sums of the mini-batch in progress, and the trainer collects the list after the update (:mod:`recipe.fspo.worker`).
One recorder exists per process, because verl's loss registry holds plain functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from fspo.attributes import AttributeSums
from fspo.sums import SequenceSums

if TYPE_CHECKING:
    from fspo.attributes import Attribute
    from fspo.calibration import BandState
    from fspo.types import SequenceLossOutput

#: One mini-batch of one rank: ``SequenceSums.to_numpy()``.
SumArrays = tuple[np.ndarray, np.ndarray]
#: One mini-batch of one rank, float64: statistic S, length L, advantage A and weight of each sequence, [4, B].
SequenceArrays = np.ndarray
_SEQUENCE_COLUMNS: Final = ("S", "L", "A", "weight")
#: Column of a batch that holds the bin of each sequence by each attribute, int64 [B, A] (see fspo.attributes).
ATTRIBUTE_BINS: Final = "fspo_attribute_bins"


class Recorder:
    """Collects :class:`~fspo.sums.SequenceSums` per mini-batch and holds the band state sent by the trainer."""

    def __init__(self) -> None:
        self.max_response_length: int | None = None
        self.run_dir: Path | None = None
        self.band_state: BandState | None = None
        self._mini_batches: list[SequenceSums] | None = None
        self._sequences: list[list[SequenceArrays]] | None = None
        self._grad_norms: list[float] = []
        self.attributes: tuple[Attribute, ...] = ()
        self.attribute_bin_BA: torch.Tensor | None = None
        self._attribute_sums: list[list[AttributeSums]] = []

    def enable(self, max_response_length: int, sequences: bool = False, run_dir: Path | None = None) -> None:
        """Start recording. Without this call (plain verl) :meth:`add` does nothing.

        Args:
            max_response_length: responses of this many tokens or more count as truncated.
            sequences: keep S, L, A and weight of every sequence too.
            run_dir: the run's folder, for what a worker itself has to write.
        """
        self.max_response_length = max_response_length
        self.run_dir = run_dir
        self.band_state = None
        self._mini_batches = []
        self._sequences = [] if sequences else None
        self._grad_norms = []
        self.attributes, self.attribute_bin_BA, self._attribute_sums = (), None, []

    def begin_mini_batch(self) -> None:
        """Open the sums of the next mini-batch."""
        if self._mini_batches is not None:
            self._mini_batches.append(SequenceSums.zeros())
        if self._sequences is not None:
            self._sequences.append([])
        if self.attributes:
            self._attribute_sums.append([AttributeSums.zeros(attribute) for attribute in self.attributes])

    def current_band_state(self) -> BandState | None:
        """The band state for the mini-batch in progress; None before any was sent."""
        if self.band_state is None or not self._mini_batches:
            return self.band_state
        return self.band_state.at_mini_batch(len(self._mini_batches) - 1)

    def add(self, output: SequenceLossOutput) -> None:
        """Add one micro-batch to the mini-batch in progress."""
        if not torch.isfinite(output.log_ratio_B[output.valid_B]).all():
            return  # its gradient is not finite either: recipe.fspo.faults.nonfinite stops the run and keeps the batch
        if self._mini_batches:
            truncated_B: torch.Tensor = output.length_B >= self.max_response_length
            self._mini_batches[-1].add_(output, truncated_B=truncated_B)
            if self.attributes:
                assert self.attribute_bin_BA is not None, "the trainer sends the bins before it sends the attributes"
                for sums, bin_B in zip(self._attribute_sums[-1], self.attribute_bin_BA.unbind(1), strict=True):
                    sums.add_(output, bin_B, truncated_B)
        if self._sequences:
            columns = (output.log_ratio_B, output.length_B, output.advantage_B, output.weight_B)
            rows = torch.stack([column[output.valid_B].to(torch.float64) for column in columns])
            self._sequences[-1].append(rows.cpu().numpy())

    def end_mini_batch(self, grad_norm: float | None) -> None:
        """Keep the gradient norm (before clipping) of the mini-batch in progress; None where verl reports none."""
        if self._mini_batches is not None and grad_norm is not None:
            self._grad_norms.append(grad_norm)

    def pop_grad_norms(self) -> list[float]:
        """Gradient norms before clipping of the mini-batches since the last call."""
        recorded, self._grad_norms = self._grad_norms, []
        return recorded

    def pop(self) -> list[SumArrays]:
        """Hand over the mini-batches recorded since the last call, in the order of their updates."""
        recorded, self._mini_batches = self._mini_batches or [], []
        return [sums.to_numpy() for sums in recorded]

    def pop_attribute_sums(self) -> list[list[np.ndarray]]:
        """The same by attribute: for every mini-batch the sums [bins, F] of each of ``attributes``."""
        recorded, self._attribute_sums = self._attribute_sums, []
        return [[sums.sums_GF.numpy() for sums in mini_batch] for mini_batch in recorded]

    def pop_sequences(self) -> list[SequenceArrays]:
        """The same for single sequences; empty unless they are recorded."""
        recorded, self._sequences = self._sequences or [], None if self._sequences is None else []
        return [np.concatenate([np.empty((4, 0)), *parts], axis=1) for parts in recorded]


#: The recorder of this process.
RECORDER = Recorder()


def sequence_records(step: int, mini_batches: Sequence[SequenceArrays]) -> list[dict[str, Any]]:
    """Lines of ``sequences.jsonl``: S, L, A and weight of every sequence of one step, a line per mini-batch."""
    return [
        {"step": step, "minibatch": index}
        | {name: [float(f"{x:.7g}") for x in row] for name, row in zip(_SEQUENCE_COLUMNS, rows, strict=True)}
        for index, rows in enumerate(mini_batches)
    ]
