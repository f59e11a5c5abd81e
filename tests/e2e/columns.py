"""The responses of a run: all of them, and those that count for its clip values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fspo.table import FOLDER, read_table


def all_rows(folder: Path) -> pd.DataFrame:
    """Every response of a table without problems, in the order of the mini-batches; S is NaN of those left out."""
    table, rows = read_table(folder), pd.read_parquet(folder / FOLDER)
    assert table.problems == [] and len(table) == rows["S"].notna().sum()
    assert (rows["S"].notna() | (rows["A"] == 0)).all()
    return rows.sort_values(["step", "update"], kind="stable").reset_index(drop=True)


def assert_measured(rows: pd.DataFrame, values: Sequence[Mapping[str, Any]], accept: float = 0.85) -> None:
    """FSPO's clip values are those inside which ``accept`` of the responses lie that count.

    These have a gradient, come after an update that moved the weights, by its gradient or, once there has been one, by
    momentum, and are of the last five steps that have such responses.
    """
    has = rows["S"].notna() & (rows["A"] != 0)
    first = rows["update"].where(has).groupby(rows["step"]).transform("min")
    first = first.where(rows["step"] == rows["step"][has].min(), 0)
    counted = rows[has & (rows["minibatch"] > 0) & (rows["update"] > first)]
    assert len(counted) == (has & (rows["update"] > first)).sum()
    steps = sorted(counted["step"].unique())
    assert [value["after_step"] for value in values] == steps[:10], "set by every step that counts, then fixed"
    for value in values:
        latest = [step for step in steps if step <= value["after_step"]][-5:]
        of_steps = counted[counted["step"].isin(latest)]
        needed = of_steps["S"].abs() / np.sqrt(of_steps["L"])
        assert (needed <= value["c_high"] * (1 + 1e-5)).mean() >= accept - 1e-9, value
        assert (needed < value["c_high"] * (1 - 1e-5)).mean() <= accept + 1e-9, value
        assert value["c_low"] == pytest.approx(value["c_high"]), value


def assert_in_force(rows: pd.DataFrame, values: Sequence[Mapping[str, Any]]) -> None:
    """Each step was clipped by the values measured before it: a run begins without a clip."""
    for step, of_step in rows[rows["S"].notna()].groupby("step"):
        before = [value["c_high"] for value in values if value["after_step"] < step]
        needed = of_step["S"].abs() / np.sqrt(of_step["L"])
        c = before[-1] if before else np.inf
        clear = (needed / c - 1).abs() > 1e-5
        assert (of_step["inside"].astype(bool) == (needed <= c))[clear].all(), step
