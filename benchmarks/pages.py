"""From rows of finished runs to the documentation: JSON lines, archives, and the sections of a page."""

from __future__ import annotations

import contextlib
import json
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fspo.files import atomic_path


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace a file by these objects, one a line."""
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@contextlib.contextmanager
def opened(records: Path) -> Iterator[Path]:
    """A folder of runs, or an archive of one (.tar.xz), as a folder."""
    if records.is_dir():
        yield records
        return
    with tempfile.TemporaryDirectory() as folder, tarfile.open(records) as archive:
        archive.extractall(folder, filter="data")
        yield Path(folder)


def replace_section(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the two comments of section ``name``.

    Raises:
        ValueError: if the page has no such section.
    """
    begin, end = f"<!-- {name}: ", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    comment, closed, rest = rest.partition("-->\n")
    _, ended, after = rest.partition(end)
    if not (found and closed and ended):
        raise ValueError(f"the page has no section {begin}... --> to {end}")
    return f"{before}{begin}{comment}-->\n\n{text}\n\n{end}{after}"


def write_section(path: Path, name: str, text: str) -> None:
    """:func:`replace_section` in a file."""
    page = replace_section(path.read_text(encoding="utf-8"), name, text)
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
