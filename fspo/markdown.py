"""The one way to a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text, without a newline at its end; each row has a cell for each head; bars are escaped.

    Cells are padded, so that a terminal shows columns.
    """
    lines = [list(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in lines)
