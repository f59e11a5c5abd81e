"""The responses of a run: all of them, and those of a mini-batch in an order that does not depend on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from fspo.table import FOLDER, read_table


def all_rows(folder: Path) -> pd.DataFrame:
    """Every response of a table without problems, in the order of the mini-batches; S is NaN of those left out."""
    table, rows = read_table(folder), pd.read_parquet(folder / FOLDER)
    assert table.problems == [] and len(table) == rows["S"].notna().sum()
    assert (rows["S"].notna() | (rows["A"] == 0)).all()
    return rows.sort_values(["step", "update"], kind="stable")


def in_order(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Columns of the table of responses, [C, B]."""
    order = np.lexsort([rows[name] for name in ("S", "A", "L")])
    return np.stack([rows[name][order] for name in ("L", "A", "S", "Q", "inside", "kept", "weight")])
