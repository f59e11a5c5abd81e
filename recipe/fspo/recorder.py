"""What the policy loss of one worker process shares with the trainer: records out, band state in.

verl averages what a policy loss returns as metrics over micro-batches, ranks and mini-batches, unweighted. Exact
figures by length, and per mini-batch, therefore travel beside verl's metrics: the loss adds each micro-batch to the
mini-batch in progress (:class:`fspo.audit.Audit`), and the trainer collects the list after the update
(:mod:`recipe.fspo.worker`). Under plain verl the worker writes them to files instead (:mod:`recipe.fspo.audit`). One
recorder exists per process, because verl's loss registry holds plain functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from fspo.audit import Audit
from fspo.positions import OCTAVES, prefixes

if TYPE_CHECKING:
    from fspo.positions import PositionSums
    from fspo.sums import SequenceSums
    from fspo.types import BandState, SequenceLossOutput

#: Rows of :attr:`MiniBatch.sequences`, as a line of sequences.jsonl names them.
SEQUENCE_COLUMNS: Final = ("S", "L", "A", "weight", "Q", "row", "accepted")
#: Column of a batch, int64 [B]: each sequence's row number; -1 for padding.
ROWS: Final = "fspo_rows"


@dataclass
class MiniBatch:
    """What was recorded of one mini-batch, by one rank or, joined with ``+``, by all.

    Attributes:
        sums: Sums by final length.
        positions: Sums by position in the response.
        sequences: float64 [7 + 36, B], :data:`SEQUENCE_COLUMNS` of every sequence: sequence log-ratio S, length L,
            advantage A, weight, the sum Q of its squared token log-ratios, its row in the rollout batch (-1 if not
            sent), accepted (1) or not (0); then its :func:`fspo.positions.prefixes`; empty unless asked for.
        grad_norm: Norm of the whole gradient, before clipping; the same on all ranks, None where verl reports none.
        learning_rate: Of its optimizer step; with 0 (at the start of a warm-up) the weights stay where they are.
    """

    sums: SequenceSums
    positions: PositionSums
    sequences: np.ndarray
    grad_norm: float | None = None
    learning_rate: float | None = None

    @property
    def moves(self) -> bool:
        """Whether its optimizer step moves the weights."""
        return self.learning_rate != 0 and (self.grad_norm is None or math.isfinite(self.grad_norm))

    def __add__(self, other: MiniBatch) -> MiniBatch:
        sums, positions = self.sums + other.sums, self.positions + other.positions
        sequences = np.concatenate([self.sequences, other.sequences], axis=1)
        return replace(self, sums=sums, positions=positions, sequences=sequences)


def join_ranks(per_rank: Sequence[Sequence[MiniBatch] | None]) -> list[MiniBatch]:
    """Join what the ranks recorded: entry i of the result holds mini-batch i of the rollout batch, over all ranks.

    A rank that another one speaks for has None.

    Raises:
        ValueError: if the ranks recorded different numbers of mini-batches.
    """
    told = [recorded for recorded in per_rank if recorded is not None]
    return [sum(ranks[1:], start=ranks[0]) for ranks in zip(*told, strict=True)]


def end_of_response(response_mask_BT: torch.Tensor) -> torch.Tensor:
    """Position after the last token of the model, [B]; 0 for a row without any.

    That is its length L, unless a tool or an environment has written some of the response: those tokens have mask 0 and
    do not count in L, but they do use up ``data.max_response_length``.
    """
    position_T = torch.arange(1, response_mask_BT.shape[-1] + 1, device=response_mask_BT.device)
    return torch.where(response_mask_BT.to(torch.bool), position_T, 0).amax(dim=-1)


def sequence_record(step: int, index: int, mini_batch: MiniBatch) -> dict[str, Any]:
    """A line of ``sequences.jsonl``: :data:`SEQUENCE_COLUMNS` of every sequence of one mini-batch.

    ``S_t`` and ``Q_t`` hold for each sequence its prefix sums at t = 1, 2, 4, ... up to L.
    """
    *measured, row_B, accepted_B = mini_batch.sequences[: len(SEQUENCE_COLUMNS)]
    line: dict[str, Any] = {name: _short(values) for name, values in zip(SEQUENCE_COLUMNS, measured, strict=False)}
    line |= {"row": row_B.astype(int).tolist(), "accepted": accepted_B.astype(int).tolist()}
    for name, of_t in zip(("S_t", "Q_t"), np.split(mini_batch.sequences[len(SEQUENCE_COLUMNS) :], 2), strict=True):
        line[name] = [_short(values[~np.isnan(values)]) for values in of_t.T]
    return {"step": step, "minibatch": index} | line


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{x:.7g}") for x in values]


class Recorder:
    """Collects a :class:`MiniBatch` per optimizer step, and holds what the trainer sends for the update."""

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        #: What the losses add to; None (plain verl, without an audit) records nothing.
        self.audit: Audit | None = None
        #: Micro-batches that losses have handed over.
        self.added = 0
        #: Holds back an error of the recording, in an audit.
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext
        self._max_response_length: int | None = None
        self._forget()

    def _forget(self) -> None:
        """Begin without a band state and without records."""
        self.row_B: torch.Tensor | None = None
        self._keep_sequences = False
        self._band_state: BandState | None = None
        #: Factor on the loss (``match_scale=matched``).
        self.loss_scale = 1.0
        self._done = 0
        self._mini_batches: list[MiniBatch] = []
        self._sequences: list[np.ndarray] | None = None

    def enable(self, max_response_length: int, run_dir: Path | None = None) -> None:
        """Start recording.

        Args:
            max_response_length: responses that end here or later count as truncated.
            run_dir: the run's folder, for what a worker itself has to write.
        """
        self._forget()
        self.audit = Audit()
        self._max_response_length, self.run_dir = max_response_length, run_dir

    def begin_update(
        self,
        band_state: BandState | None,
        done: int,
        sequences: bool = False,
        loss_scale: float = 1.0,
    ) -> None:
        """What the update that follows uses and keeps.

        Args:
            band_state: Of the rollout batch.
            done: Mini-batches of the rollout batch that were handed over before: ``mode=separate_async`` updates once
                for each.
            sequences: Keep :data:`SEQUENCE_COLUMNS` of every sequence too.
            loss_scale: Factor on the loss.
        """
        self._band_state, self._done = band_state, done
        self._keep_sequences, self.loss_scale = sequences, loss_scale

    def begin_mini_batch(self) -> None:
        """Open the records of the next mini-batch."""
        self._sequences = [np.empty((len(SEQUENCE_COLUMNS) + 2 * OCTAVES, 0))]

    def current_band_state(self) -> BandState | None:
        """The band state for the mini-batch in progress; None before any was sent."""
        if self._band_state is None or self._sequences is None:
            return self._band_state
        return self._band_state.at_mini_batch(self._done + len(self._mini_batches))

    def add(self, loss: str, tensors: Sequence[torch.Tensor], output: SequenceLossOutput | None) -> None:
        """Add one micro-batch to the mini-batch in progress.

        Args:
            loss: Name of the loss.
            tensors: What the loss was called with: log_prob, old_log_prob, advantages, response_mask, [B, T].
            output: What it made of them; None where its rule of acceptance is not known.
        """
        self.added += 1
        if self.audit is None or (output is None and self._max_response_length is not None):
            return  # in a run of this recipe, sums without acceptance would pass for an acceptance of 100%
        with self.guard():
            self.audit.loss = loss
            log_prob_BT, old_log_prob_BT, advantages_BT, mask_BT = tensors
            own_run = self._max_response_length is not None
            if own_run and output is not None and not torch.isfinite(output.log_ratio_B[output.valid_B]).all():
                return  # a gradient that is not finite stops the run, and the batch is kept (faults/nonfinite.py)
            truncated_B = None
            if self._max_response_length is not None:
                truncated_B = end_of_response(mask_BT) >= self._max_response_length
            self.audit.add(log_prob_BT, old_log_prob_BT, mask_BT, advantages_BT, output, truncated_B)
            if self._keep_sequences and output is not None and self._sequences is not None:
                row_B = torch.full_like(output.length_B, -1) if self.row_B is None else self.row_B
                measured = (output.log_ratio_B, output.length_B, output.advantage_B, output.weight_B)
                # Of a loss that keeps a share: accepted if most of the weight is.
                log_ratio_BT = log_prob_BT.detach().double() - old_log_prob_BT
                q_B = log_ratio_BT.masked_fill(mask_BT == 0, 0.0).square().sum(dim=-1)
                columns = (*measured, q_B, row_B.to(output.length_B.device), output.accepted_B > 0.5)
                prefixes_XB = prefixes(log_ratio_BT, mask_BT).transpose(1, 2).flatten(0, 1)
                rows = torch.stack([column[output.valid_B].to(torch.float64) for column in columns])
                self._sequences.append(torch.cat([rows, prefixes_XB[:, output.valid_B]]).cpu().numpy())

    def end_mini_batch(self, grad_norm: float | None, learning_rate: float | None = None) -> None:
        """Close the mini-batch in progress, with the gradient norm (before clipping) and its learning rate."""
        if self.audit is not None and self._sequences is not None:
            sequences = np.concatenate(self._sequences, axis=1)
            self._mini_batches.append(MiniBatch(*self.audit.take(), sequences, grad_norm, learning_rate))
        self._sequences = None

    def pop(self) -> list[MiniBatch]:
        """Hand over the mini-batches recorded since the last call, in the order of their updates."""
        recorded, self._mini_batches = self._mini_batches, []
        return recorded


#: The recorder of this process.
RECORDER = Recorder()
