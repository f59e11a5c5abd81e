"""The writing side of an audit: the rows of a rank, mini-batch by mini-batch."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from fspo.files import folder_problem
from fspo.losses import check_shapes, judge
from fspo.table import NO_ROWS, Rows, TableWriter, as_rows, join_rows

if TYPE_CHECKING:
    from fspo.types import SequenceLossOutput, SequenceLossSettings


def minibatch_numbers(moves: Sequence[bool]) -> list[int]:
    """Numbers of the mini-batches of a rollout batch, as the records have them: 0 until the first weight has moved.

    If pi_old is the policy at the start of the step, S is 0 there, but for rounding, and readers leave these out.

    Args:
        moves: For each mini-batch in order, whether its optimizer step moves the weights (not with learning rate 0).
    """
    return [index if any(moves[:index]) else 0 for index in range(len(moves))]


class Audit:
    """Rows of one rank, mini-batch by mini-batch, in memory and in a table. Defined here.

    Args:
        folder: Where the table goes; it is made if it does not exist. None keeps nothing on disk.
        rule: The loss, if its rule of acceptance is one of this package's. Without it, and without ``output`` in
            :meth:`add`, ``inside``, ``kept`` and ``weight`` are null.
        loss: Name of the loss, for readers.
        rank, ranks: Which of how many ranks that see different sequences this is.
        run: The same on all ranks of a start, another one for each start.
        precision: In which the model computes, for readers.
        meta: More of the table's metadata, such as ``{"every_mini_batch": "yes"}`` where the first mini-batches count
            (:data:`fspo.responses.EVERY_MINI_BATCH`).

    Raises:
        ValueError: If the band of ``rule`` is measured during training, which nothing here does.
        NotADirectoryError: If ``folder`` cannot be made or written to. If writing fails later, a line says so once, and
            nothing more is kept on disk.
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
        precision: str = "",
        meta: Mapping[str, str] | None = None,
    ) -> None:
        if rule is not None and rule.needs_state:
            remedy = "give a fixed rule such as ALGORITHMS['fspo'], or none and add(..., output=) of your loss"
            raise ValueError(f"rule= with drift={rule.drift!r}: an audit measures no band; {remedy}")
        if folder is not None and (problem := folder_problem(Path(folder))):
            raise NotADirectoryError(f"{folder}: {problem}")
        #: None where nothing is written, or nothing more after an error of the disk.
        self._folder = folder
        self._said: set[str] = set()
        self._whose: dict[str, Any] = {"run": run or uuid.uuid4().hex[:12], "rank": rank, "ranks": ranks}
        self._writer: TableWriter | None = None
        self._rule, self._meta = rule, {"loss": loss, "rule": "unknown", "precision": precision, **(meta or {})}
        self._step = -1
        self._moves: list[bool] = []
        #: Columns of the micro-batches of the mini-batch in progress.
        self._parts: list[Rows] = []

    def begin_step(self, step: int) -> None:
        """Begin a rollout batch; what an interrupted one has left is dropped. A step that has begun goes on."""
        if step != self._step:
            self._step, self._moves, self._parts = step, [], []

    def add(
        self,
        log_prob_BT: Any,
        old_log_prob_BT: Any,
        mask_BT: Any,
        advantages_BT: Any,
        output: SequenceLossOutput | None = None,
        truncated_B: Any = None,
        row_B: Any = None,
        rollout_weight_BT: Any = None,
        *,
        kept: Any = None,
        weight: Any = None,
    ) -> None:
        """Add one micro-batch to the mini-batch in progress.

        A response with a log-probability that is not finite is left out: its row has no S. Values of [B, T] may be a
        tensor, an array, a jagged nested tensor, or a list with one of 1 dimension for each response; packed ones come
        in by :func:`from_packed`.

        Args:
            log_prob_BT, old_log_prob_BT: log pi and log pi_old of the response tokens, nats.
            mask_BT: Nonzero on the response tokens; a row without any is padding.
            advantages_BT: A, [B, T], whose mean over the tokens of a sequence counts; or [B] or [B, 1].
            output: The loss's own output, if it says what the loss accepts and removes.
            truncated_B: True where the response was cut at the maximum length.
            row_B: Position of each response in the rollout batch.
            rollout_weight_BT: Weights of the rollout correction, [B, T].
            kept: Share of each response that your own mask leaves, in [0, 1]: [B], [B, 1], or [B, T], whose mean over
                the tokens counts. It takes the place of a rule. To audit a mask that compares pi_old with the engine,
                pass log pi_old as log_prob_BT, the engine's log-probabilities as old_log_prob_BT, and read the audit
                with --every-mini-batch.
            weight: Weight that a loss or a correction gives each response, in the same shapes; only with ``kept``.

        Raises:
            TypeError: If values are none of these.
            ValueError: If shapes differ, ``kept`` lies outside [0, 1], stands beside a rule or an ``output``, or
                ``weight`` stands without ``kept``.
        """
        with torch.no_grad():
            new_BT, old_BT = _tensor("log_prob_BT", log_prob_BT), _tensor("old_log_prob_BT", old_log_prob_BT)
            mask_BT, a_BT = _tensor("mask_BT", mask_BT), _tensor("advantages_BT", advantages_BT)
            if new_BT.dim() == 2 and a_BT.shape in ((len(new_BT),), (len(new_BT), 1)):
                a_BT = a_BT.view(-1, 1).expand(new_BT.shape)
            check_shapes(new_BT, old_BT, a_BT, mask_BT, None)
            known = output is not None or self._rule is not None
            if weight is not None and kept is None:
                raise ValueError("weight= without kept=: give kept=torch.ones(B), too, if nothing is masked")
            if kept is not None and known:
                raise ValueError("kept=: the rule of the audit or output= says already what is kept; leave one out")
            output = judge(new_BT, old_BT, a_BT, mask_BT, self._rule) if output is None else output
            s_B = output.log_ratio_B.masked_fill(~output.valid_B, torch.nan)  # the loss may have left it out
            columns = {"S": s_B, "A": output.advantage_B, "L": mask_BT.to(torch.bool).sum(-1)}
            if kept is not None:
                self._meta["rule"] = "own"
                columns["inside"] = columns["kept"] = _by_response("kept", kept, mask_BT)
                weight = torch.ones(len(mask_BT)) if weight is None else weight
                columns["weight"] = _by_response("weight", weight, mask_BT)
            elif known:
                self._meta["rule"] = "known"
                columns |= output.judgement()
            if rollout_weight_BT is not None:
                columns["rollout_weight"] = _by_response("rollout_weight", rollout_weight_BT, mask_BT)
            judged = columns.keys() - {"L", "A"}
            more = {"truncated": truncated_B, "row": row_B}
            columns |= {name: _by_response(name, x, mask_BT) for name, x in more.items() if x is not None}
            # One stacked copy, because one transfer per column would cost as many synchronisations per micro-batch.
            stacked_CB = torch.stack([column.detach().to(new_BT.device, torch.float64) for column in columns.values()])
        rows = dict(zip(columns, stacked_CB.cpu().numpy(), strict=True))
        left_out_B = ~np.isfinite(rows["S"])
        for name in judged:
            rows[name][left_out_B] = np.nan
        is_response_B = rows["L"] > 0
        self._parts.append(as_rows({name: values[is_response_B] for name, values in rows.items()}))

    def end_mini_batch(self, step: int, moves: bool = True) -> Rows:
        """Write the mini-batch in progress, if there is a folder, and begin the next one.

        Args:
            step: Of its rollout batch.
            moves: Whether its optimizer step moves the weights (not where the learning rate is 0).

        Returns:
            Its rows; one that is left out has no S. Their ``minibatch`` is 0 if no weight had moved before it.
        """
        step, parts = int(step), self._parts  # a tensor or an integer of numpy, too
        self.begin_step(step)
        self._moves.append(moves)
        self._parts = []
        rows = join_rows([NO_ROWS, *parts])
        if left_out := int(np.isnan(rows["S"]).sum()):
            self._say(step, "lacks responses", left_out_words(left_out))
        place = {"step": step, "update": len(self._moves) - 1, "minibatch": minibatch_numbers(self._moves)[-1]}
        if self._folder is not None:
            self._write(self._folder, {**place, **rows})
        return {name: np.full(len(rows["S"]), value, np.int64) for name, value in place.items()} | rows

    def _write(self, folder: str | Path, rows: Mapping[str, Any]) -> None:
        """Append to the table; the record ends, and not the training, where the disk takes no more."""
        try:
            self._writer = self._writer or TableWriter(folder, self._meta, **self._whose)
            if self._writer.append(rows):
                remedy = "count rollout batches through all epochs, and give each start a run= of its own"
                self._say(rows["step"], "came twice", f"what was recorded from it on is replaced; {remedy}")
        except OSError as error:
            self._say(rows["step"], "ends the record", f"{error}; nothing more goes to {folder}; training goes on")
            self._folder = None

    def _say(self, step: int, what: str, says: str) -> None:
        """Print a line, the first time that there is one of its kind."""
        if what not in self._said:
            self._said.add(what)
            print(f"fspo.audit: step {step} {what}: {says}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the record: all rows are on the disk already."""
        self._writer = self._folder = None


def _tensor(name: str, values: Any) -> torch.Tensor:
    """A tensor of a tensor, an array, a jagged tensor, or a list with one of 1 dimension for each response."""
    if isinstance(values, torch.Tensor) and not values.is_nested:
        return values.detach()
    try:
        if isinstance(values, torch.Tensor):
            values = values.detach().unbind()
        if isinstance(values, Sequence) and any(np.ndim(value) for value in values):
            rows = [_tensor(name, value) for value in values]
            if all(row.dim() == 1 for row in rows):
                return pad_sequence(rows, batch_first=True)
        tensor: torch.Tensor = torch.from_numpy(np.array(values))
        return tensor
    except (TypeError, ValueError, RuntimeError) as error:
        takes = "a tensor or an array, [B, T], a jagged nested tensor, or a list with a tensor [T] for each response"
        raise TypeError(f"{name} is a {type(values).__name__}, and add takes {takes} ({error})") from None


def _by_response(name: str, values: Any, mask_BT: torch.Tensor) -> torch.Tensor:
    """[B] of [B], [B, 1] or [B, T]: the mean over the tokens of the mask."""
    values = _tensor(name, values).to(mask_BT.device)
    if values.shape in ((len(mask_BT),), (len(mask_BT), 1)):
        values = values.reshape(-1, 1).expand(mask_BT.shape)
    if values.shape != mask_BT.shape:
        raise ValueError(f"{name}= has shape {tuple(values.shape)}: give [B] or [B, T], as {tuple(mask_BT.shape)}")
    inside_BT = mask_BT.to(torch.bool)
    mean_B: torch.Tensor = values.double().masked_fill(~inside_BT, 0.0).sum(-1) / inside_BT.sum(-1).clamp(min=1)
    if name == "kept" and bool(((mean_B < 0) | (mean_B > 1)).any()):
        raise ValueError(f"kept= is from {mean_B.min():.4g} to {mean_B.max():.4g}: must be in [0, 1]")
    return mean_B


def from_packed(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Values of packed sequences, [T] or [1, T], as [B, longest], with 0 behind the end of each.

    Of ``torch.ones_like(values)``, or of the mask of the response tokens, it gives the mask.

    Args:
        values: One for each token of all sequences, one after the other.
        cu_seqlens: Where each sequence begins, and the end of the last, [B + 1], as attention kernels take it.

    Raises:
        ValueError: If the two do not belong together.
    """
    values_T = values.reshape(-1)
    ends = cu_seqlens.to(torch.int64)
    if ends.dim() != 1 or ends[:1].any() or ends[-1:].tolist() != [len(values_T)] or (ends.diff() < 0).any():
        remedy = "cut padding at the end of the pack off both"
        raise ValueError(f"cu_seqlens must rise from 0 to the number of values, {len(values_T)}; {remedy}")
    sequences = torch.split(values_T, ends.diff().tolist())
    return pad_sequence(list(sequences), batch_first=True) if sequences else values_T.new_zeros(0, 0)


def left_out_words(count: int) -> str:
    """That so many responses are left out."""
    return f"{count} response{'s' * (count != 1)} with a log-probability that is not finite left out"
