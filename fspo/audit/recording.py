"""The writing side of an audit: the sums of a rank, mini-batch by mini-batch."""

from __future__ import annotations

import dataclasses
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from fspo.acceptance import judge
from fspo.losses import check_shapes
from fspo.positions import PositionSums
from fspo.records import to_record
from fspo.sums import SequenceSums

if TYPE_CHECKING:
    from fspo.types import SequenceLossOutput, SequenceLossSettings

#: Files of an audit: the run's identifier and the rank's number stand between these.
PREFIX, SUFFIX = "audit-", ".jsonl"


class MiniBatchSums(NamedTuple):
    """One mini-batch of a rank: its number (:func:`minibatch_numbers`), its sums by final length and by position."""

    number: int
    sums: SequenceSums
    positions: PositionSums


def minibatch_numbers(moves: Sequence[bool], on_policy: bool = True) -> list[int]:
    """Numbers of the mini-batches of a rollout batch in every record: 0 where readers leave a mini-batch out.

    Where pi_old is the policy at the start of the step, S is 0, but for rounding, until the first weight has moved.

    Args:
        moves: Of each mini-batch in order, whether its optimizer step moves the weights (not with learning rate 0).
        on_policy: Whether pi_old is the policy at the start of the step; otherwise none is left out.
    """
    if not on_policy:
        return list(range(1, len(moves) + 1))
    return [index if any(moves[:index]) else 0 for index in range(len(moves))]


class Audit:
    """Sums of one rank, mini-batch by mini-batch, in memory and in a file. Defined here.

    Args:
        folder: Where the file goes, made if it is not there; None keeps nothing on disk.
        rule: The loss, if its rule of acceptance is one of this package's. Without it, and without ``output`` in
            :meth:`add`, only S, L and A are summed.
        loss: Name of the loss, for readers.
        rank, ranks: Which of how many ranks that see different sequences this is.
        run: The same on all ranks of a start, another one for each start.
        on_policy: Whether pi_old is the policy at the start of each step; see :func:`minibatch_numbers`.

    Raises:
        ValueError: If the band of ``rule`` is measured during training, which nothing here does.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        rule: SequenceLossSettings | None = None,
        *,
        loss: str = "",
        rank: int = 0,
        ranks: int = 1,
        run: str = "",
        on_policy: bool = True,
    ) -> None:
        if rule is not None and rule.needs_state:
            raise ValueError(
                f"rule={rule!r}: its band is measured during training, and an audit measures none; give a rule "
                "that stands still, such as fspo, or none, and add(..., output=) what your loss makes of its own state"
            )
        run = run or uuid.uuid4().hex[:12]
        self._file = None if folder is None else Path(folder) / f"{PREFIX}{run}-{rank:05d}{SUFFIX}"
        self._whose = {"run": run, "rank": rank, "ranks": ranks}
        self.loss = loss
        self._rule, self._on_policy = rule, on_policy
        self.knows_acceptance, self.knows_truncation = rule is not None, False
        self._step = -1
        self._moves: list[bool] = []
        self._left_out: torch.Tensor | int = 0
        self._warned = False
        #: Micro-batches of the mini-batch in progress, and their sums.
        self.micro_batches, self.sums, self.positions = 0, SequenceSums.zeros(), PositionSums.zeros()

    @property
    def writes(self) -> bool:
        """Whether the sums go to a file."""
        return self._file is not None

    def begin_step(self, step: int) -> None:
        """Count the mini-batches of this rollout batch from now on, unless they are already being counted."""
        if step != self._step:
            self._step, self._moves = step, []

    @property
    def index(self) -> int:
        """Mini-batches of the rollout batch that have ended: the index of the one in progress."""
        return len(self._moves)

    def add(
        self,
        log_prob_BT: torch.Tensor,
        old_log_prob_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        advantages_BT: torch.Tensor,
        output: SequenceLossOutput | None = None,
        truncated_B: torch.Tensor | None = None,
    ) -> None:
        """Add one micro-batch to the mini-batch in progress.

        A response with a log-probability that is not finite is left out, and counted.

        Args:
            log_prob_BT, old_log_prob_BT: log pi and log pi_old of the response tokens, nats; packed ones come in by
                :func:`from_packed`.
            mask_BT: Nonzero on the response tokens; a row without any is padding.
            advantages_BT: A, [B, T], whose mean over the tokens of a sequence counts; or [B] or [B, 1].
            output: What the loss accepts and removes, if it says so itself.
            truncated_B: True where the response was cut at the maximum length; None: not known.

        Raises:
            ValueError: If shapes differ.
        """
        with torch.no_grad():
            if log_prob_BT.dim() == 2 and advantages_BT.shape in ((len(log_prob_BT),), (len(log_prob_BT), 1)):
                advantages_BT = advantages_BT.view(-1, 1).expand(log_prob_BT.shape)
            check_shapes(log_prob_BT, old_log_prob_BT, advantages_BT, mask_BT, None)
            self.micro_batches += 1
            self.knows_acceptance |= output is not None
            self.knows_truncation |= truncated_B is not None
            tensors = (log_prob_BT.detach(), old_log_prob_BT, advantages_BT, mask_BT)
            if output is None:
                output = judge(*tensors, self._rule)
            mask_BT = mask_BT.to(torch.bool)
            usable_B = torch.isfinite(output.log_ratio_B) & (output.valid_B | ~mask_BT.any(dim=-1))
            self._left_out = (~usable_B).sum() + self._left_out
            output = dataclasses.replace(output, valid_B=output.valid_B & usable_B)
            mask_BT = mask_BT & usable_B[:, None]
            self.sums.add_(output, truncated_B)
            self.positions.add_(log_prob_BT.detach().double() - old_log_prob_BT, mask_BT)

    def clear(self) -> None:
        """Forget the mini-batch in progress; the next one begins."""
        self.micro_batches, self._left_out = 0, 0
        self.sums, self.positions = SequenceSums.zeros(), PositionSums.zeros()

    def end_mini_batch(self, step: int, moves: bool = True) -> MiniBatchSums:
        """Write the mini-batch in progress, if there is a folder, and begin the next one.

        Args:
            step: Of the rollout batch that it belongs to.
            moves: Whether its optimizer step moves the weights (not where the learning rate is 0).

        Returns:
            Its number, which is 0 if readers leave it out, and its sums.
        """
        self.begin_step(step)
        self._moves.append(moves)
        number, left_out = minibatch_numbers(self._moves, self._on_policy)[-1], int(self._left_out)
        sums, positions = self.sums, self.positions
        self.clear()
        if left_out and not self._warned:
            self._warned = True
            print(f"fspo.audit: step {step}: {left_out_words(left_out)}", file=sys.stderr, flush=True)
        if self._file is not None:
            lines = [to_record(sums, positions, step=step, minibatch=number) | {"left_out": left_out}]
            if not self._file.exists():
                self._file.parent.mkdir(parents=True, exist_ok=True)
                known = {"acceptance": self.knows_acceptance, "truncation": self.knows_truncation}
                lines.insert(0, {"audit": 1, "loss": self.loss} | known | self._whose)
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        return MiniBatchSums(number, sums, positions)


def from_packed(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Values of packed sequences, [T] or [1, T], as [B, longest], with 0 behind the end of each.

    Of ``torch.ones_like(values)``, or of the mask of the response tokens, it gives the mask.

    Args:
        values: One for each token of all sequences, one after the other.
        cu_seqlens: Where each sequence begins, and the end of the last, [B + 1], as attention kernels take it.

    Raises:
        ValueError: If the two do not belong together.
    """
    ends, values_T = cu_seqlens.to(values.device, torch.int64), values.reshape(-1)
    length_B = ends.diff()
    if ends.dim() != 1 or len(ends) == 0 or ends[0] != 0 or ends[-1] != len(values_T) or bool((length_B < 0).any()):
        raise ValueError(
            f"cu_seqlens={ends.flatten()[:5].tolist()}... of {ends.numel()}: must rise from 0 to the number of values, "
            f"{len(values_T)}; cut padding at the end of the pack off both"
        )
    inside_BT = torch.arange(int(length_B.max()) if len(length_B) else 0, device=values.device) < length_B[:, None]
    return values_T.new_zeros(inside_BT.shape).masked_scatter(inside_BT, values_T)


def left_out_words(count: int) -> str:
    return f"{count} response{'s' * (count != 1)} with a log-probability that is not finite left out"
