"""Run folders that somebody else has written, or a disk has damaged: a whole one, and one thing wrong with it.

Every field that anything reads of ``run.json`` gets values of other types and sizes, every other file of a folder other
content, and every file becomes something that is no file. The table of responses is cut and spoiled, and its columns
get other types and values.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fspo.records import RUN_FIELDS
from fspo.table import FOLDER, NEEDED

Spoil = Callable[[Path], None]

DEEP = "[" * 5000 + "]" * 5000
#: Values of JSON, by what is wrong with them where another one belongs.
VALUES = {
    "null": "null",
    "a switch": "true",
    "zero": "0",
    "negative": "-1",
    "huge": str(10**19),
    "huger": str(10**400),
    "infinite": "1e350",
    "NaN": "NaN",
    "text": '"1"',
    "no text": '""',
    "mathtext": r'"a$\\frac{$b"',
    "half a surrogate": r'"\ud800\u001b[2J"',
    "long": json.dumps("x" * 300_000),
    "a path": '"../../x/y"',
    "a list": "[]",
    "lists": "[[[1], null]]",
    "texts": '["a", 1, null]',
    "an object": "{}",
    "objects": '[{"a": {"b": 1}}, {"started": 5}]',
    "of objects": '{"a": {"b": [1]}, "id": 3}',
    "nested": "[" * 30 + "]" * 30,
    "deep": DEEP,
}
_BOMB = "a0: &a0 [x,x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1},*a{i - 1}]\n" for i in range(1, 40))
CONFIGS = {
    "a cycle": "&a {b: *a}",
    "an alias": "run: &a {dir: x}\ntrainer: *a\n",
    "a bomb": _BOMB,
    "deep": "a: " + "[" * 5000,
    "deep blocks": "- " * 5000,
    "a tag": "a: !!python/object/apply:os.system [touch /tmp/pwned]",
    "an unknown tag": "a: !x 1",
    "text": "x",
    "a list": "- 1",
    "nothing": "",
    "numbers": "1: 2\n3.5: {4: 5}\nrun: 7\ntrainer: [1]\nactor_rollout_ref: null\n",
    "huge numbers": f"a: {'9' * 5000}\n",
    "base 60": f"a: 1{':1' * 100_000}\n",
    "keys that are lists": "? [1, 2]\n: 3\n",
    "keys twice": "a: 1\na: 2\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "no text": "\x00\x01",
    "interpolations": "a: ${b}\nb: ${a}\nc: '${${${'\n",
    "lists for text": "trainer: {validation_data_dir: [1], rollout_data_dir: {a: 1}}\nrun: {dir: [1]}\n",
    "wide": "a: [" + "1," * 200_000 + "]\n",
}
#: Of a line, what its first match of a pattern becomes.
_LINES = {
    "deep": (r"\{.*\}", DEEP),
    "no object": (r"\{.*\}", "[1]"),
    "cut": (r".{5}$", ""),
    "binary": (r"\{.*\}", "\x00\x01\x02"),
    **{f"step: {what}": (r'"step": ?\d+', f'"step": {value}') for what, value in VALUES.items()},
}
#: By file: what has every value, and where it goes; GROUP is what the pattern's group holds. Then what has one.
_PLACES = {
    "metrics.jsonl": {
        "metrics": (r'"metrics": ?\{.*\}\}', '"metrics": VALUE}'),
        "a metric": (r": ?[-\d.e]+\}\}", ": VALUE}}"),
    },
    "funnel.jsonl": {
        "rows": (r'"rows": ?\[.*?\]\]', '"rows": VALUE'),
        "a bin": (r'"rows": ?\[\[-?\d+', '"rows": [[VALUE'),
        "tokens": (r'"tokens": ?\{.*?\}', '"tokens": VALUE'),
    },
}
_ONCE = {
    "metrics.jsonl": {"a metric: the largest": (r": ?[-\d.e]+\}\}", ": 1e308}}")},
    "funnel.jsonl": {"a short row": (r'"rows": ?\[\[.*?\]', '"rows": [[1, 2]')},
}
#: A closed and an open part of the table.
PART, STREAM = (
    f"{FOLDER}/{name}" for name in ("responses-run-00000-000000-000000.parquet", "_responses-run-00000-000001.arrow")
)
FILES = ("run.json", "config.yaml", "metrics.jsonl", "funnel.jsonl", "phase.json", FOLDER, PART, STREAM)


def _no_files() -> Iterator[tuple[str, Callable[[Path], None]]]:
    yield "a FIFO", os.mkfifo
    yield "a device", lambda path: path.symlink_to("/dev/zero")
    yield "a folder", Path.mkdir
    yield "a link to itself", lambda path: path.symlink_to(path.name)
    yield "a terabyte", lambda path: (path.touch(), os.truncate(path, 10**12))
    yield "nothing", Path.touch


def _replaced(name: str, make: Callable[[Path], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return spoil


def _edited(name: str, pattern: str, new: str) -> Spoil:
    def spoil(folder: Path) -> None:
        lines = (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
        lines[-1] = re.sub(
            pattern, lambda m: new.replace("GROUP", (*m.groups(), "")[0]), lines[-1].rstrip("\n"), count=1
        )
        (folder / name).write_text("".join(lines) + "\n", encoding="utf-8")

    return spoil


def _field(name: str, value: str) -> Spoil:
    def spoil(folder: Path) -> None:
        info = json.loads((folder / "run.json").read_text(encoding="utf-8")) | {name: "HERE"}
        text = json.dumps(info).replace('"HERE"', value)
        (folder / "run.json").write_text(text, encoding="utf-8")

    return spoil


def of_run_json() -> Iterator[tuple[str, Spoil]]:
    """Every field of run.json with every value."""
    for name in RUN_FIELDS:
        for what, value in VALUES.items():
            yield f"run.json: {name}: {what}", _field(name, value)
    yield "run.json: all of it deep", _replaced("run.json", lambda path: path.write_text(DEEP))
    yield "run.json: a loss of any type", _field("loss", '{"loss_mode": ["fspo"], "c_low": {}, "c_high": "x"}')
    for low in ("1e308", "-1", "1e-320", '"1"', "NaN", "true"):
        yield f"run.json: c_low {low}", _field("loss", f'{{"loss_mode": "fspo", "c_low": {low}, "c_high": 1}}')
        yield f"run.json: measured {low}", _field("clip_values_measured", f'[{{"c_low": {low}}}]')


def of_files(*names: str) -> Iterator[tuple[str, Spoil]]:
    """Every file in place of which there is something else."""
    for name in names:
        for what, make in _no_files():
            yield f"{name}: {what}", _replaced(name, make)


def of_config() -> Iterator[tuple[str, Spoil]]:
    """config.yaml with every hostile text."""
    for what, text in CONFIGS.items():
        yield f"config.yaml: {what}", _replaced("config.yaml", lambda path, text=text: path.write_text(text))


def of_lines(*names: str) -> Iterator[tuple[str, Spoil]]:
    """Every file of lines whose last line is damaged."""
    for name in names:
        for what, (pattern, new) in (_LINES | _ONCE[name]).items():
            yield f"{name}: {what}", _edited(name, pattern, new)
        for place, (pattern, new) in _PLACES[name].items():
            for what, value in VALUES.items():
                yield f"{name}: {place}: {what}", _edited(name, pattern, new.replace("VALUE", value))


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return spoil


def _rewritten(change: Callable[[pa.Table], pa.Table]) -> Spoil:
    def spoil(folder: Path) -> None:
        table = pq.read_table(folder / PART, partitioning=None)
        pq.write_table(change(table), folder / PART)

    return spoil


def _with(name: str, values: Any, kind: pa.DataType | None = None) -> Spoil:
    """A column with one value for all rows, or for the first one and the old for the rest."""

    def change(table: pa.Table) -> pa.Table:
        column = pa.array([values] * len(table), kind)
        return table.set_column(table.schema.get_field_index(name), name, column)

    return _rewritten(change)


def _meta(key: bytes, value: bytes) -> Spoil:
    return _rewritten(lambda table: table.replace_schema_metadata({**table.schema.metadata, key: value}))


def _nested(depth: int) -> pa.DataType:
    kind = pa.float32()
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


def of_table() -> Iterator[tuple[str, Spoil]]:
    """A table that is cut, spoiled, or has other columns; a name has the file or column.

    A ``quiet`` one leaves nothing out: all rows are there.
    """
    for name in (PART, STREAM):
        for what, share in (("its beginning", 0.01), ("a half", 0.5), ("all but a byte", 0.999)):
            yield (
                f"table: {name}: {what} is there",
                _bytes(name, lambda old, share=share: old[: int(share * len(old)) or 1]),
            )
        # The first page of Parquet and the end of its metadata; the mark and the length of the first message of Arrow.
        for place in (4, -6) if name == PART else (0, 4):
            yield (
                f"table: {name}: spoiled at {place}",
                _bytes(name, lambda old, at=place: _overwritten(old, at % len(old))),
            )
        yield f"table: {name}: text", _bytes(name, lambda old: b"x" * 10_000)
    for name in NEEDED:
        yield f"table: {name}: no column", _rewritten(lambda table, name=name: table.drop_columns([name]))
    for name in (*NEEDED, "A", "inside", "kept", "truncated"):
        yield f"table: {name}: a column of lists", _with(name, [1.0])
        yield f"table: {name}: a column of objects", _with(name, {"a": 1})
        yield f"table: {name}: deep", _with(name, None, _nested(100))
        yield f"table: {name}: a column of text", _with(name, "1")
        yield f"table: {name}: infinite numbers", _with(name, float("inf"))
        yield f"table: {name}: numbers past all bounds", _with(name, 1e300)
    for name in ("step", "update", "minibatch", "L"):
        for what, value in (("negative", -2), ("huge", 2**62), ("a fraction", 0.5), ("no number", float("nan"))):
            yield f"table: {name}: {what}", _with(name, value)
    for name in ("inside", "kept", "truncated"):
        yield f"table: {name}: negative", _with(name, -1.0)
        yield f"table: {name}: above 1", _with(name, 2.0)
    yield "table: S: twice", _rewritten(lambda table: table.append_column("S", table["S"]))
    for ranks in (b"1000000000000", b"-1", b"x", b"\xff", b"9" * 5000):
        yield f"quiet: meta ranks: {ranks[:20]!r}", _meta(b"ranks", ranks)
    yield "quiet: meta: no text", _meta(b"\xff\xfe", b"\x00\xff")
    yield f"table: {PART}: a row count past all bounds", _rewritten(lambda table: pa.table({"S": pa.nulls(10**8 + 1)}))


def _overwritten(old: bytes, place: int) -> bytes:
    return old[:place] + bytes(byte ^ 0xFF for byte in old[place : place + 4]) + old[place + 4 :]


def of_phase() -> Iterator[tuple[str, Spoil]]:
    """phase.json with every value in place of its time, its step and all of it; and a start that has no end."""
    started = '[{"started": "2026-01-31T12:00:00+00:00"}]'
    times = {"later than all years": "1e300", "of the past": "-1e15", **VALUES}
    for name in ("since", "step", "phase", "queue"):
        for what, value in times.items():
            record = {"step": "1", "phase": '"update"', "since": "1769860981.5", name: value}
            text = "{" + ", ".join(f'"{key}": {one}' for key, one in record.items()) + "}"
            yield f"phase.json: {name}: {what}", _both(_field("starts", started), "phase.json", text)


def _both(first: Spoil, name: str, text: str) -> Spoil:
    def spoil(folder: Path) -> None:
        first(folder)
        (folder / name).write_text(text, encoding="utf-8")

    return spoil
