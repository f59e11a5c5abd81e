"""What a run folder records of its sequences: sums by mini-batch, and on request every sequence.

The sums of a mini-batch are one compact JSON object, a line of length_stats.jsonl; sequences.jsonl is what runs with
``fspo.record_sequences=true`` write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fspo.files import complete_lines, without_abandoned
from fspo.sums import FIELDS, LAYOUT_VERSION, SequenceSums

Array = npt.NDArray[np.float64]

_DIGITS: Final = 9


def to_record(sums: SequenceSums, *, step: int, minibatch: int) -> dict[str, Any]:
    """The nonzero fine bins of one mini-batch.

    Args:
        sums: Over all ranks and micro-batches of the mini-batch.
        step: Training step.
        minibatch: Position of the mini-batch in the step, from 0; mini-batch 0 has S = 0.

    Returns:
        ``{"layout", "step", "minibatch", "rows", "hist"}``. Each row is [fine bin, value of each of FIELDS]; each entry
        of hist is [fine bin, cell of Z_EDGES, count]. Values have nine significant digits; counts are exact.
    """
    filled = (sums.sums_KF != 0).any(dim=1).nonzero().flatten().tolist()
    return {
        "layout": LAYOUT_VERSION,
        "step": step,
        "minibatch": minibatch,
        "rows": [[k, *(_compact(x) for x in sums.sums_KF[k].tolist())] for k in filled],
        "hist": sums.cells().tolist(),
    }


def from_record(record: Mapping[str, Any]) -> SequenceSums:
    """Inverse of :func:`to_record` (up to nine significant digits).

    Raises:
        ValueError: If the record is of another layout or malformed; the message says what is wrong.
    """
    if record.get("layout") != LAYOUT_VERSION:
        raise ValueError(f"layout is {record.get('layout')!r}, this version of fspo reads {LAYOUT_VERSION}")
    sums = SequenceSums.zeros()
    try:
        rows = torch.tensor(record["rows"], dtype=torch.float64).reshape(-1, 1 + len(FIELDS))
        hist = torch.tensor(record["hist"], dtype=torch.int64).reshape(-1, 3)
        if bool((rows[:, 0] < 0).any() or (hist < 0).any()):
            raise ValueError("a bin or a count is negative")
        sums.sums_KF[rows[:, 0].long()] = rows[:, 1:]
        sums.hist_KH[hist[:, 0], hist[:, 1]] = hist[:, 2]
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ValueError(f"malformed record of length statistics: {error}") from error
    return sums


def _compact(value: float) -> float | int:
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.{_DIGITS}g}")


@dataclass(frozen=True, slots=True)
class MiniBatches:
    """The recorded sequences of one run, without the first mini-batch of each step: S (nats), L and A of each."""

    step: list[int]
    s: list[Array]
    length: list[Array]
    advantage: list[Array]

    def pooled(self) -> tuple[Array, Array]:
        """S and L of all sequences."""
        return np.concatenate(self.s), np.concatenate(self.length)


def read_sequences(run: Path) -> MiniBatches | None:
    """``sequences.jsonl`` of a run; None if it recorded none.

    Of a mini-batch that was done again, the last line counts; steps that the run has left by going back do not.
    """
    lines = without_abandoned(complete_lines(run / "sequences.jsonl"))
    rows = {(row["step"], row["minibatch"]): row for row in lines if row["minibatch"] > 0}
    if not rows:
        return None
    ordered = [rows[key] for key in sorted(rows)]
    columns = ([np.asarray(row[name], dtype=np.float64) for row in ordered] for name in ("S", "L", "A"))
    return MiniBatches([row["step"] for row in ordered], *columns)
