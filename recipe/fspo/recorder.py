"""The recorder of a worker process: it hands the trainer records of the policy loss, and the loss its band state.

verl averages what a policy loss returns as metrics over micro-batches, ranks and mini-batches, unweighted. A row per
response and mini-batch therefore travels beside verl's metrics: the wrapper around each loss
(:func:`recipe.fspo.policy_loss.observe_losses`) adds each micro-batch to the mini-batch in progress
(:class:`fspo.audit.Audit`), and the trainer collects the list after the update (:mod:`recipe.fspo.worker`). Under plain
verl the audit writes them to files instead (:mod:`recipe.fspo.audit`). One recorder exists per process, because verl's
loss registry holds plain functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from fspo.audit import Audit
from fspo.table import Rows, join_rows

if TYPE_CHECKING:
    from fspo.types import BandState, SequenceLossOutput

#: Column of a batch, int64 [B]: each sequence's row number; -1 for padding.
ROWS: Final = "fspo_rows"


def weights_moved(grad_norm: float | None, learning_rate: float | None) -> bool:
    """False if the learning rate is 0 or the gradient norm is not finite. None: not reported."""
    return learning_rate != 0 and (grad_norm is None or math.isfinite(grad_norm))


@dataclass
class MiniBatch:
    """What was recorded of one mini-batch, by one rank or, joined, by all.

    Attributes:
        number: See :func:`fspo.audit.minibatch_numbers`; 0 before any weight has moved.
        rows: Columns of the table, [B] each; see :class:`fspo.audit.MiniBatchRows`.
        grad_norm: Norm of the whole gradient, before clipping; the same on all ranks, None where verl reports none.
        learning_rate: Of its optimizer step; with 0 (at the start of a warm-up) the weights stay where they are.
    """

    number: int
    rows: Rows
    grad_norm: float | None = None
    learning_rate: float | None = None


def join_ranks(per_rank: Sequence[Sequence[MiniBatch] | None]) -> list[MiniBatch]:
    """Join what the ranks recorded: entry i of the result holds mini-batch i of the rollout batch, over all ranks.

    A rank that another one speaks for has None. Responses stand in the order of their rows in the rollout batch, so
    that no figure depends on the ranks.

    Raises:
        ValueError: if the ranks recorded different numbers of mini-batches.
    """
    by_rank = [recorded for recorded in per_rank if recorded is not None]
    return [_join(ranks) for ranks in zip(*by_rank, strict=True)]


def _join(ranks: Sequence[MiniBatch]) -> MiniBatch:
    rows = join_rows([one.rows for one in ranks])
    if "row" in rows:
        order = np.argsort(rows["row"], kind="stable")
        rows = {name: values[order] for name, values in rows.items()}
    return replace(ranks[0], rows=rows)


def end_of_response(response_mask_BT: torch.Tensor) -> torch.Tensor:
    """Position after the last token of the model, [B]; 0 for a row without any.

    That is its length L, unless a tool or an environment has written some of the response: those tokens have mask 0 and
    do not count in L, but they do use up ``data.max_response_length``.
    """
    position_T = torch.arange(1, response_mask_BT.shape[-1] + 1, device=response_mask_BT.device)
    return torch.where(response_mask_BT.to(torch.bool), position_T, 0).amax(dim=-1)


class Recorder:
    """Collects a :class:`MiniBatch` per optimizer step, and holds what the trainer sends for the update."""

    def __init__(self) -> None:
        #: Records and counts the mini-batches of this rank; None (plain verl, without an audit) records nothing.
        self.audit: Audit | None = None
        #: Factor on the loss (``fspo.match_scale=matched``).
        self.loss_scale = 1.0
        #: Responses that end here or later count as truncated; None: not known.
        self.max_response_length: int | None = None
        #: Whether a trainer of this recipe collects the mini-batches.
        self.is_of_a_trainer = False
        self._band_state: BandState | None = None
        self._step = 0
        self._row_B: torch.Tensor | None = None
        self._output: SequenceLossOutput | None = None
        self._mini_batches: list[MiniBatch] = []

    def enable(self, max_response_length: int) -> None:
        """Start recording for a trainer of this recipe, which collects the mini-batches.

        Args:
            max_response_length: responses that end here or later count as truncated.
        """
        self.audit = Audit()
        self.max_response_length, self.is_of_a_trainer = max_response_length, True

    def begin_update(self, band_state: BandState | None, step: int, loss_scale: float = 1.0) -> None:
        """Set what the next update uses.

        Args:
            band_state: Of the rollout batch.
            step: Of the rollout batch. ``mode=separate_async`` updates once for each of its mini-batches.
            loss_scale: Factor on the loss.
        """
        self._band_state, self._step, self.loss_scale = band_state, step, loss_scale
        if self.audit is not None:
            self.audit.begin_step(step)

    def begin_mini_batch(self) -> None:
        """Open the records of the next mini-batch."""
        if self.audit is not None:
            self.audit.clear()

    def begin_micro_batch(self, row_B: torch.Tensor | None) -> None:
        """Note which responses of the rollout batch the next micro-batch holds, int64 [B]; None: not known."""
        self._row_B = row_B

    def current_band_state(self) -> BandState | None:
        """The band state for the mini-batch in progress; None before any was sent."""
        if self._band_state is None or self.audit is None:
            return self._band_state
        return self._band_state.at_mini_batch(self.audit.index)

    def take(self, output: SequenceLossOutput) -> None:
        """See :class:`fspo.verl.Recorder`; :meth:`pop_output` hands it over, where anything is recorded."""
        if self.audit is not None:
            self._output = output

    def pop_output(self) -> SequenceLossOutput | None:
        """What a loss has handed over since the last call; None if its rule of acceptance is not one of ours."""
        output, self._output = self._output, None
        return output

    def add(
        self,
        loss: str,
        tensors: Sequence[torch.Tensor],
        output: SequenceLossOutput | None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> None:
        """Add one micro-batch to the mini-batch in progress.

        Args:
            loss: Name of the loss.
            tensors: What the loss was called with: log_prob, old_log_prob, advantages, response_mask, [B, T].
            output: What it made of them; None where its rule of acceptance is not known.
            rollout_is_weights: Weights of verl's rollout correction, [B, T]; None without one.
        """
        if self.audit is None:
            return
        self.audit.loss = loss
        log_prob_BT, old_log_prob_BT, advantages_BT, mask_BT = tensors
        if self.is_of_a_trainer and output is not None and not torch.isfinite(output.log_ratio_B[output.valid_B]).all():
            return  # a gradient that is not finite stops the run, and the batch is kept (faults/nonfinite.py)
        truncated_B = None
        if self.max_response_length is not None:
            truncated_B = end_of_response(mask_BT) >= self.max_response_length
        of_rows = (output, truncated_B, self._row_B, rollout_is_weights)
        self.audit.add(log_prob_BT, old_log_prob_BT, mask_BT, advantages_BT, *of_rows)

    def end_mini_batch(self, grad_norm: float | None, learning_rate: float | None = None) -> None:
        """Close the mini-batch in progress, with the gradient norm (before clipping) and its learning rate."""
        if self.audit is None:
            return
        ended = self.audit.end_mini_batch(self._step, weights_moved(grad_norm, learning_rate))
        if not self.audit.writes:  # otherwise nobody collects them
            self._mini_batches.append(MiniBatch(*ended, grad_norm, learning_rate))

    def pop(self) -> list[MiniBatch]:
        """Hand over the mini-batches recorded since the last call, in the order of their updates."""
        recorded, self._mini_batches = self._mini_batches, []
        return recorded


#: The recorder of this process.
RECORDER = Recorder()
