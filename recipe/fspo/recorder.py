"""The recorder of a worker process: rows of the mini-batches for the trainer, band state and scale for the loss.

verl averages what a policy loss returns as metrics over micro-batches, ranks and mini-batches, unweighted. A row per
response and mini-batch therefore travels beside verl's metrics. It is made here and nowhere else, from what verl hands
to its loss (:func:`rows_of`): S, L and A of any loss, and of verl's token-level losses what they keep. The trainer
collects the rows after the update (:mod:`recipe.fspo.worker`), judges those of a band, and adds what it alone knows
(:mod:`recipe.fspo.step_records`). One recorder exists per process, because verl's loss registry holds plain functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from recipe.fspo.policy_loss import kept_by_gradient

import fspo.verl
from fspo.losses import sequence_log_ratio
from fspo.table import NO_ROWS, Rows, as_rows, join_rows
from verl.workers.utils.padding import no_padding_2_padding

if TYPE_CHECKING:
    from fspo.types import BandState

#: Column of a batch, int64 [B]: each sequence's row number; -1 for padding.
ROWS: Final = "fspo_rows"


@dataclass
class MiniBatch:
    """What was recorded of one mini-batch, by one rank or, joined, by all."""

    rows: Rows  #: Columns of :data:`fspo.table.SCHEMA`, [B] each. A response without a token left has L = 0.
    grad_norm: float | None = None  #: Of the whole gradient, before clipping; None where verl reports none.
    learning_rate: float | None = None  #: Of its optimizer step; 0 (of a warm-up) leaves the weights where they are.
    momentum: bool = False  #: Whether the optimizer keeps gradients of earlier mini-batches, which move weights, too.

    @property
    def moves(self) -> bool:
        """Whether its optimizer step moves the policy. Weight decay alone does so by next to nothing."""
        norm = 1.0 if self.grad_norm is None else self.grad_norm
        return math.isfinite(norm) and (norm != 0 or self.momentum) and self.learning_rate != 0


class Recorder:
    """Collects a :class:`MiniBatch` per optimizer step, and holds what the trainer sends for the update."""

    def __init__(self) -> None:
        #: Factor on the loss (``fspo.match_scale=matched``).
        self.loss_scale = 1.0
        self._band_state: BandState | None = None
        self._step = self._index = 0
        #: Of the micro-batches of the mini-batch in progress.
        self.parts: list[Rows] = []
        self._learning_rate: float | None = None
        #: Whether the optimizer's state has had a gradient. Before the first mini-batch, a state is a checkpoint's.
        self._momentum = True

    def begin_update(self, band_state: BandState | None, step: int, loss_scale: float = 1.0) -> None:
        """Set what the next update uses: band state of the rollout batch of a step, and factor on the loss.

        ``mode=separate_async`` updates once for each of its mini-batches.
        """
        if step != self._step:
            self._step, self._index = step, 0
        self._band_state, self.loss_scale = band_state, loss_scale

    def current_band_state(self) -> BandState | None:
        """The band state for the mini-batch in progress; None before any was sent."""
        return None if self._band_state is None else self._band_state.at_mini_batch(self._index)

    def begin_mini_batch(self, optimizer: Any) -> None:
        """Keep what the mini-batch's step will find in the optimizer: a learning rate, and momentum."""
        groups = getattr(optimizer, "param_groups", None)
        self._learning_rate = float(groups[0]["lr"]) if groups else None
        self._momentum &= bool(getattr(optimizer, "state", None))

    def end_mini_batch(self, grad_norm: float | None) -> MiniBatch:
        """Close the mini-batch in progress, with the gradient norm (before clipping)."""
        parts, self.parts, self._index = self.parts, [], self._index + 1
        ended = MiniBatch(join_rows([NO_ROWS, *parts]), grad_norm, self._learning_rate, self._momentum)
        self._momentum |= bool(grad_norm and math.isfinite(grad_norm))
        return ended


#: The recorder of this process.
RECORDER: Final = Recorder()
fspo.verl.recorder = RECORDER


@torch.no_grad()
def rows_of(log_probs: torch.Tensor, data: Any, config: Any) -> Rows:
    """Columns of a micro-batch ``data`` as verl hands it to its loss, without padding.

    ``log_probs`` is log pi of all tokens, packed, in nats; ``config`` verl's configuration of the actor.
    """
    names = ["old_log_probs", "advantages", "response_mask", "rollout_is_weights"]
    columns = data.select(*(name for name in names if name in data)).to_padded_tensor()
    log_prob_BT, old_BT, advantages_BT = no_padding_2_padding(log_probs, data), *map(columns.get, names[:2])
    mask_BT = columns["response_mask"].bool()
    length_B = mask_BT.sum(-1)

    def mean(values_BT: torch.Tensor) -> torch.Tensor:
        return values_BT.double().masked_fill(~mask_BT, 0.0).sum(-1) / length_B.clamp(min=1)

    rows = {"S": sequence_log_ratio(log_prob_BT, old_BT, mask_BT), "L": length_B, "A": mean(advantages_BT)}
    if (weights_BT := columns.get("rollout_is_weights", None)) is not None:
        rows["rollout_weight"] = mean(weights_BT)
    if (row_B := data.get(ROWS, None)) is not None:
        # TransferQueue hands out every column nested, of equal rows too.
        rows["row"] = (torch.stack(row_B.unbind()) if row_B.is_nested else row_B).flatten()
    rows |= kept_by_gradient(log_prob_BT, old_BT, advantages_BT, mask_BT, config)
    # One stacked copy, because one transfer per column would cost as many synchronisations per micro-batch.
    values = [column.to(length_B.device, torch.float64) for column in rows.values()]
    whole = dict(zip(rows, torch.stack(values).cpu().numpy(), strict=True))
    is_response_B = whole.get("row", whole["L"] - 1) >= 0
    lost_B = ~np.isfinite(whole["S"]) | (whole["L"] == 0)
    for name in whole.keys() & {"S", "inside", "kept", "weight"}:
        whole[name][lost_B] = np.nan
    return as_rows({name: column[is_response_B] for name, column in whole.items()})
