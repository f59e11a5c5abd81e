"""What a path is that does not hold the rows which its name promises.

A download that failed, a pointer in place of a file or a folder in place of its files are the commonest faults of data
files, and a reader's exception names none of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

#: Files of rows; verl reads these names only.
SUFFIXES: Final = (".parquet", ".jsonl", ".json")
_PARQUET: Final = b"PAR1"
#: First bytes of other files, in lower case, and what to do with such a file.
_OTHERS: Final = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file: run `git lfs pull`, or download it again"),
    (b"/annex/objects/", "a git-annex pointer, not the file: run `git annex get`, or download it again"),
    (b"<!doctype", "a web page, not what its address promised: download it again"),
    (b"<html", "a web page, not what its address promised: download it again"),
    (b"<?xml", "XML, such as the answer of a server that refused a download: download it again"),
    (b"\x1f\x8b", "compressed by gzip: unpack it (gunzip), and give the result"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it (unzstd), and give the result"),
    (b"bzh", "compressed by bzip2: unpack it (bunzip2), and give the result"),
    (b"\xfd7zxz", "compressed by xz: unpack it (unxz), and give the result"),
    (b"pk\x03\x04", "a zip archive: unpack it, and give the files in it"),
    (b"arrow1", "an Arrow file: read it with pyarrow.feather.read_table, and write it as Parquet"),
    (
        b"\xff\xff\xff\xff",
        "an Arrow stream: write it by datasets.Dataset.from_file('{path}').to_parquet(FILE)",
    ),
    (b"\x89hdf", "an HDF5 file: write it as Parquet"),
    (b"sqlite format 3", "an SQLite database: write it as Parquet"),
)
_HEAD: Final = 512  # bytes
_SHOWN: Final = 4  # files that a sentence names
_VISITED: Final = 10_000  # names below a folder that are looked at


def no_rows_in(path: Path, suffixes: Collection[str] = SUFFIXES) -> str:
    """What a path is, and what to do with it, if it is no file of rows; empty if it may be one.

    Only the name and the first and last bytes are looked at. ``suffixes`` are those of the names that are read.
    """
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        if path.is_symlink():
            return f"is a link to {os.readlink(path)}, which does not exist: copy the file itself, or download it again"
        return "is no ordinary file: give one" if path.exists() else "does not exist: correct the path, or make it"
    with path.open("rb") as file:
        first, last = file.read(_HEAD), b""
        if first.startswith(_PARQUET):
            file.seek(-len(_PARQUET), os.SEEK_END)
            last = file.read()
    text = first.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not first:
        return "is empty (0 bytes), as a copy or a download that failed: make it again"
    if len(first) < _HEAD and b"".join(first.split()) in (b"", b"[]", b"{}"):
        return "has no rows: leave it out, or make it again"
    for sign, what in _OTHERS:
        if text.lower().startswith(sign):
            return f"is {what.format(path=path)}"
    if last:
        if last != _PARQUET:
            return f"is a Parquet file that is cut off after {path.stat().st_size} bytes: copy it again, whole"
        return "" if path.suffix == ".parquet" else "is a Parquet file by another name: call it NAME.parquet"
    is_json = text[:1] in (b"{", b"[")
    if path.suffix == ".parquet":
        way = "it is JSON: call it NAME.jsonl" if is_json else "copy it again, or write it as Parquet"
        return f"is not a Parquet file, as it begins with {first[:12]!r}: {way}"
    if path.suffix not in suffixes:
        way = "call it NAME.jsonl" if is_json else "write it as one of these"
        return f"is not one of the files that are read, {', '.join(suffixes)}: {way}"
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "is text in UTF-16: write it in UTF-8"
    return ""


def _folder(folder: Path) -> str:
    """What a folder is in place of a file of rows, and what to give in its place."""
    is_dict = (folder / "dataset_dict.json").is_file()  # of several splits
    saved = [path.parent for path in folder.glob("*/state.json" if is_dict else "state.json")]
    if saved:
        load = f"datasets.load_from_disk('{min(saved)}').to_parquet(FILE)"
        return f"is a folder of datasets' save_to_disk: {load} makes a file of it"
    below = itertools.islice(folder.rglob("*"), _VISITED)  # it may be the root
    files = sorted(str(path) for path in below if path.suffix in SUFFIXES and path.is_file())
    if not files:
        return f"is a folder without {', '.join(SUFFIXES)} files: give a file"
    more = ",..." if len(files) > _SHOWN else ""
    return f"is a folder: give its files, as [{','.join(files[:_SHOWN])}{more}]"
