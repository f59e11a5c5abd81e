"""Rows as a Parquet file, which replaces no file of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from fspo.files import atomic_path

#: In the metadata of every file that is written here; a file without it is never replaced.
_WRITER: Final = {b"written_by": b"fspo"}


def check_replaceable(path: Path) -> None:
    """Raise FileExistsError if ``path`` exists and :func:`write_rows` has not written it."""
    metadata: Mapping[bytes, bytes] = {}
    with suppress(OSError, ValueError):  # no Parquet file
        metadata = pq.read_schema(path).metadata or {}
    if path.exists() and not _WRITER.items() <= metadata.items():
        raise FileExistsError(f"{path} exists and was not written by this program: give another folder, or move it")


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows as a Parquet file, atomically. Raises FileExistsError as :func:`check_replaceable`."""
    check_replaceable(path)
    with atomic_path(path) as temporary:
        pq.write_table(pa.Table.from_pylist(list(rows)).replace_schema_metadata(_WRITER), temporary)
