"""The sequences that runs with ``fspo.record_sequences=true`` have recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


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

    A line that a kill has cut is left out, even where a resumed run has ended it. Of a mini-batch that was done again,
    the last line counts.
    """
    path, rows = run / "sequences.jsonl", {}
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["minibatch"] > 0:
            rows[row["step"], row["minibatch"]] = row
    if not rows:
        return None
    ordered = [rows[key] for key in sorted(rows)]
    columns = ([np.asarray(row[name], dtype=np.float64) for row in ordered] for name in ("S", "L", "A"))
    return MiniBatches([row["step"] for row in ordered], *columns)
