"""The tables in docs/tables, which programs here write."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fspo.files import atomic_path

STUDY: Final = Path(__file__).resolve().parent / "study"
TABLES: Final = Path(__file__).resolve().parents[1] / "docs" / "tables"
#: Rows of cells; the heads are the first row.
Table = list[list[str]]


def read_table(name: str) -> Table:
    """docs/tables/NAME.csv."""
    with (TABLES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def write_tables(tables: Mapping[str, Table]) -> None:
    """Replace docs/tables/NAME.csv by each of these."""
    for name, table in tables.items():
        with atomic_path(TABLES / f"{name}.csv") as path, path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
