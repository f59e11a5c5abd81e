"""A path that holds no rows is named as what it is, with a remedy."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from fspo.row_files import no_rows_in

ROWS = [{"a": 1}, {"a": 2}]
JSON = b'{"a": 1}\n{"a": 2}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12\n" % (b"a" * 64)


def parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), buffer)
    return buffer.getvalue()


def arrow() -> bytes:
    buffer = io.BytesIO()
    feather.write_feather(pa.Table.from_pylist(ROWS), buffer, compression="uncompressed")
    return buffer.getvalue()


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.jsonl", JSON)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.parquet", parquet()),
        ("a.jsonl", JSON),
        ("a.json", b"\xef\xbb\xbf" + JSON),
        ("a.jsonl", b"{]"),
        ("a.json", b"1"),
    ],
)
def test_what_may_be_a_file_of_rows_is_left_to_its_reader(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert no_rows_in(tmp_path / name) == ""


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *((name, POINTER, ("git-lfs", "git lfs pull")) for name in ("a.parquet", "a.jsonl", "a")),
        ("a.parquet", b"/annex/objects/MD5-s12--a.parquet\n", ("git annex get",)),
        ("a.parquet", b"\n<!DOCTYPE html><title>Sign in</title>", ("web page", "download it again")),
        ("a.jsonl", b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", ("download it again",)),
        ("a.jsonl.gz", gzip.compress(JSON, mtime=0), ("gunzip",)),
        ("a.parquet", gzip.compress(parquet(), mtime=0), ("gunzip",)),
        ("a.parquet", zipped(), ("zip",)),
        ("a.arrow", arrow(), ("Arrow", "read_table")),
        ("a.parquet", b"", ("0 bytes",)),
        ("a.json", b"[ ]\n", ("no rows",)),
        ("a.parquet", parquet()[:-9], ("cut off", str(len(parquet()) - 9), "copy it again")),
        ("a.parquet", parquet()[9:], ("not a Parquet file", "copy it again")),
        ("a.parquet", JSON, ("JSON", "NAME.jsonl")),
        ("a.json", parquet(), ("Parquet", "NAME.parquet")),
        ("A.PARQUET", parquet(), ("Parquet", "NAME.parquet")),
        ("a.ndjson", JSON, ("NAME.jsonl",)),
        ("a.csv", b"a\n1\n", (".parquet, .jsonl, .json",)),
        ("a.jsonl", JSON.decode().encode("utf-16"), ("UTF-16", "UTF-8")),
    ],
)
def test_a_file_that_is_something_else_is_named_with_a_remedy(
    tmp_path: Path, name: str, content: bytes, says: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert all(part in no_rows_in(tmp_path / name) for part in says), no_rows_in(tmp_path / name)


def shards(folder: Path) -> None:
    for number in range(5):
        (folder / "data").mkdir(exist_ok=True)
        (folder / f"data/train-{number}.parquet").write_bytes(parquet())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: None, ("folder without",)),
        (shards, ("data/train-0.parquet,", "data/train-3.parquet,...]")),
        (lambda folder: datasets.Dataset.from_list(ROWS).save_to_disk(folder), ("load_from_disk('{}')",)),
        (
            lambda folder: datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS)).save_to_disk(folder),
            ("load_from_disk('{}/test')",),
        ),
    ],
)
def test_a_folder_is_named_with_what_to_give(
    tmp_path: Path, make: Callable[[Path], None], says: tuple[str, ...]
) -> None:
    make(tmp_path)
    what = no_rows_in(tmp_path)
    assert all(part.format(tmp_path) in what for part in says), what
    if "load_from_disk" in what:
        saved = what[what.index("datasets.") : what.index(" makes")]
        eval(saved.replace("FILE", repr(str(tmp_path / "rows.parquet"))))
        assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == ROWS


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert "does not exist" in no_rows_in(tmp_path / "a.parquet")
    (tmp_path / "link.parquet").symlink_to("/no/blob")
    assert all(part in no_rows_in(tmp_path / "link.parquet") for part in ("link to /no/blob", "download it again"))
    os.mkfifo(tmp_path / "fifo.jsonl")
    assert "no ordinary file" in no_rows_in(tmp_path / "fifo.jsonl")
