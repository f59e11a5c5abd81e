"""What the policy loss of one worker process shares with the trainer: sums out, band state in.

verl averages what a policy loss returns as metrics over micro-batches, ranks and mini-batches, unweighted. Exact
figures by length, and per mini-batch, therefore travel beside verl's metrics: the loss adds each micro-batch to the
sums of the mini-batch in progress, and the trainer collects the list after the update (:mod:`recipe.fspo.worker`).
One recorder exists per process, because verl's loss registry holds plain functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fspo.sums import SequenceSums

if TYPE_CHECKING:
    from fspo.calibration import BandState
    from fspo.types import SequenceLossOutput

#: One mini-batch of one rank: ``SequenceSums.to_numpy()``.
SumArrays = tuple[np.ndarray, np.ndarray]


class Recorder:
    """Collects :class:`~fspo.sums.SequenceSums` per mini-batch and holds the band state sent by the trainer."""

    def __init__(self) -> None:
        self.max_response_length: int | None = None
        self.band_state: BandState | None = None
        self._mini_batches: list[SequenceSums] | None = None

    def enable(self, max_response_length: int) -> None:
        """Start recording. Without this call (plain verl) :meth:`add` does nothing.

        Args:
            max_response_length: responses of this many tokens or more count as truncated.
        """
        self.max_response_length = max_response_length
        self._mini_batches = []

    def begin_mini_batch(self) -> None:
        """Open the sums of the next mini-batch."""
        if self._mini_batches is not None:
            self._mini_batches.append(SequenceSums.zeros())

    def current_band_state(self) -> BandState | None:
        """The band state for the mini-batch in progress; None before any was sent."""
        if self.band_state is None or not self._mini_batches:
            return self.band_state
        return self.band_state.at_mini_batch(len(self._mini_batches) - 1)

    def add(self, output: SequenceLossOutput) -> None:
        """Add one micro-batch to the mini-batch in progress."""
        if self._mini_batches:
            truncated_B: torch.Tensor = output.length_B >= self.max_response_length
            self._mini_batches[-1].add_(output, truncated_B=truncated_B)

    def pop(self) -> list[SumArrays]:
        """Hand over the mini-batches recorded since the last call, in the order of their updates."""
        recorded, self._mini_batches = self._mini_batches or [], []
        return [sums.to_numpy() for sums in recorded]


#: The recorder of this process.
RECORDER = Recorder()
