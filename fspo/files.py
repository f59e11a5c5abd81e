"""Files that are either complete or absent: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final

_PACKAGE: Final = "pkg://"
#: Entry in the metadata of every Parquet file that this package writes. A file without it is never replaced.
_WRITER: Final = {b"written_by": b"fspo"}


def local_path(path: str) -> str:
    """``pkg://package/folder`` as a path of the installed package; any other path unchanged."""
    if not path.startswith(_PACKAGE):
        return path
    package, _, inside = path.removeprefix(_PACKAGE).partition("/")
    return str(importlib.resources.files(package).joinpath(inside))


@contextmanager
def atomic_path(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to `path` on success, remove it on any exception.

    Parent folders are created. Readers see the old file or the new one, never a part of it; with `durable` also after
    the machine has lost its power, at the price of a disk flush. The umask says who may read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; rename it to `path` on success, remove it on any exception.

    The umask says who may read it, and every file in it.

    Raises FileExistsError if `path` exists: a folder is never replaced or mixed.
    """
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists: give a new folder, or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    mode = temporary.stat().st_mode & 0o777
    try:
        yield temporary
        for entry in temporary.rglob("*"):
            if entry.is_file() and not entry.is_symlink():
                entry.chmod(mode & 0o666)  # safetensors makes private files
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: Path, ignore_errors: bool = False) -> None:
    """Remove a folder and what is in it, if it is there; of a link only the link."""
    if path.is_symlink():
        with suppress(OSError) if ignore_errors else nullcontext():
            path.unlink()
    elif ignore_errors or path.exists():
        shutil.rmtree(path, ignore_errors=ignore_errors)


def existing_place(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def folder_problem(folder: Path) -> str | None:
    """Why `folder`, which need not exist yet, is no place for files; None if it is one."""
    place = existing_place(folder)
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return None
    return f"{place} is not a folder that can be written to; give another one"


def check_folder(folder: Path) -> None:
    """Raise NotADirectoryError if :func:`folder_problem` has something to say."""
    if problem := folder_problem(folder):
        raise NotADirectoryError(f"{folder}: {problem}")


def write_json(path: Path, value: Any, durable: bool = True, allow_nan: bool = False) -> None:
    """Write `value` as indented JSON with a final newline, atomically.

    NaN and infinities, which JSON lacks, raise ValueError unless `allow_nan` is true.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=allow_nan) + "\n"
    with atomic_path(path, durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_replaceable(path: Path) -> None:
    """Raise FileExistsError if `path` exists and :func:`write_rows` has not written it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata: Mapping[bytes, bytes] = {}
    with suppress(OSError, pa.ArrowException):
        metadata = pq.read_schema(path).metadata or {}
    if path.exists() and not _WRITER.items() <= metadata.items():
        raise FileExistsError(f"{path} exists and was not written by this program: give another folder, or move it")


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows as a Parquet file, atomically; only a file written by this function is replaced.

    Raises:
        ValueError: no rows; a trainer would fail much later on an empty file.
        FileExistsError: `path` is a file that this function has not written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not rows:
        raise ValueError(f"no rows to write to {path}: ask for at least one problem")
    check_replaceable(path)
    table = pa.Table.from_pylist(list(rows))
    with atomic_path(path) as temporary:
        pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **_WRITER}), temporary)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def piped(main: Callable[[], int]) -> int:
    """The exit status of a command; 141, as of other programs, if its reader has gone, as ``head`` does."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return 141
    return status
