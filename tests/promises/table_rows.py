"""Rows of a table that say where they belong. Imported by processes that are killed, so it imports little."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from fspo.table import TableWriter


def rows(step: int, update: int = 0, count: int = 3, rank: int = 0) -> dict[str, Any]:
    """Rows that say where they belong: A is 1000 times the step, plus the update."""
    length = np.arange(1, count + 1)
    return {
        **{"step": step, "update": update, "minibatch": update, "row": np.arange(count) + rank * count},
        **{"S": 0.1 * length, "L": length, "A": np.full(count, 1000.0 * step + update), "inside": 1.0},
        "prompt": np.array([f"p{i % 2}" for i in range(count)], object),
    }


def numbers(columns: Any) -> Counter[tuple[int, int]]:
    """Rows of each (step, update), all of which must be as they were written."""
    step_B, update_B, a_B = (np.asarray(columns[name]) for name in ("step", "update", "A"))
    assert (a_B == 1000.0 * step_B + update_B).all()
    return Counter(zip(step_B.tolist(), update_B.tolist(), strict=True))


def writer(folder: Path, **options: Any) -> TableWriter:
    return TableWriter(folder, {"loss": "fspo", "rule": "known"}, **({"run": "a"} | options))
