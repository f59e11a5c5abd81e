"""From rows of finished runs to the documentation: JSON lines, and the tables in docs/tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from fspo.files import atomic_path

STUDY: Final = Path(__file__).resolve().parent / "study"
TABLES: Final = Path(__file__).resolve().parents[1] / "docs" / "tables"
#: Rows of cells; the heads are the first row.
Table = list[list[str]]


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace a file by these objects, one a line."""
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_table(name: str) -> Table:
    """docs/tables/NAME.csv."""
    with (TABLES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def as_csv(table: Table) -> str:
    """The text of a table's file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def write_tables(tables: Mapping[str, Table]) -> None:
    """Replace docs/tables/NAME.csv by each of these."""
    for name, table in tables.items():
        with atomic_path(TABLES / f"{name}.csv") as temporary:
            temporary.write_text(as_csv(table), encoding="utf-8")
