"""Run folders that somebody else has written, or a disk has damaged: a whole one, and one thing wrong with it.

Every field that anything reads of ``run.json`` gets values of other types and sizes, every other file of a folder other
content, and every file becomes something that is no file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from fspo.records import RUN_FIELDS

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
    "length_stats.jsonl": {
        "minibatch": (r'"minibatch": ?\d+', '"minibatch": VALUE'),
        "rows": (r'"rows": ?\[.*?\]\]', '"rows": VALUE'),
        "a bin": (r'"rows": ?\[\[\d+', '"rows": [[VALUE'),
        "a count": (r'"rows": ?\[\[(\d+), ?\d+', '"rows": [[GROUP, VALUE'),
        "a cell": (r'"hist": ?\[\[(\d+), ?\d+', '"hist": [[GROUP, VALUE'),
    },
    "funnel.jsonl": {
        "rows": (r'"rows": ?\[.*?\]\]', '"rows": VALUE'),
        "a bin": (r'"rows": ?\[\[-?\d+', '"rows": [[VALUE'),
        "tokens": (r'"tokens": ?\{.*?\}', '"tokens": VALUE'),
    },
    "sequences.jsonl": {
        "uid": (r'"uid": ?\[.*?\]', '"uid": VALUE'),
        "reward": (r'"reward": ?\[[^,\]]*', '"reward": [VALUE'),
        "accepted": (r'"accepted": ?\[[^,\]]*', '"accepted": [VALUE'),
    },
}
_ONCE = {
    "metrics.jsonl": {"a metric: the largest": (r": ?[-\d.e]+\}\}", ": 1e308}}")},
    "length_stats.jsonl": {
        "a bin beyond the last": (r'"rows": ?\[\[\d+', '"rows": [[100000'),
        "layout": (r'"layout": ?\d+', '"layout": [1]'),
    },
    "funnel.jsonl": {"a short row": (r'"rows": ?\[\[.*?\]', '"rows": [[1, 2]')},
    "sequences.jsonl": {"a short column": (r'"reward": ?\[.*?\]', '"reward": [1.0]')},
}
FILES = (
    "run.json",
    "config.yaml",
    "metrics.jsonl",
    "length_stats.jsonl",
    "funnel.jsonl",
    "sequences.jsonl",
    "phase.json",
)


def _no_files() -> Iterator[tuple[str, Callable[[Path], None]]]:
    yield "a FIFO", os.mkfifo
    yield "a device", lambda path: path.symlink_to("/dev/zero")
    yield "a folder", Path.mkdir
    yield "a link to itself", lambda path: path.symlink_to(path.name)
    yield "a terabyte", lambda path: (path.touch(), os.truncate(path, 10**12))
    yield "nothing", Path.touch


def _replaced(name: str, make: Callable[[Path], object]) -> Spoil:
    def spoil(folder: Path) -> None:
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
