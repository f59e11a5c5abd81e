"""The files of a run's folder and of results: written whole or not at all, and read as far as they can be.

The responses of a run are a table (:mod:`fspo.table`). A reader that gets a list ``problems`` adds a sentence with the
file's name for what cannot be read, and leaves that out; what can be read is believed. Importing this module does not
import torch: the launching process reads run folders, too.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

METRICS_FILE: Final = "metrics.jsonl"
INFO_FILE: Final = "run.json"
CONFIG_FILE: Final = "config.yaml"


@contextmanager
def atomic_path(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to ``path`` on success, remove it on any exception.

    Parent folders are created. Readers see the old file or the new one, never a part of it; with ``durable`` also after
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


def write_json(path: Path, value: Any, durable: bool = True, allow_nan: bool = False) -> None:
    """Write ``value`` as indented JSON with a final newline, atomically.

    NaN and infinities, which JSON lacks, raise ValueError unless ``allow_nan`` is true.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=allow_nan) + "\n"
    with atomic_path(path, durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def folder_problem(folder: Path) -> str | None:
    """Why ``folder``, which need not exist yet, is no place for files; None if it is one."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return None
    return f"{place} is not a folder that can be written to; give another one"


def read_object(path: Path, problems: list[str] | None = None) -> dict[str, Any]:
    """The JSON object that a file holds, such as run.json; empty if the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        if isinstance(value, dict):
            return value
        wrong = "holds no JSON object"
    except OSError as error:
        wrong = str(error.strerror)
    except ValueError as error:
        wrong = f"is not JSON ({error})"
    if problems is not None:
        problems.append(f"{path}: {wrong}")
    return {}


def read_lines(path: Path, problems: list[str] | None = None, **fields: type) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file that have these fields, of these types.

    A kill may have cut a line, even in the middle of a file that was resumed.
    """
    problems = [] if problems is None else problems
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return []
    objects, wrong = list[dict[str, Any]](), list[int]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in fields.items()):
            objects.append(value)
        else:
            wrong.append(number)
    if wrong:
        shown = ", ".join(map(str, wrong[:10])) + f" and {len(wrong) - 10} more" * (len(wrong) > 10)
        what = "no JSON object" + f" with {' and '.join(fields)}" * bool(fields)
        problems.append(f"{path}: {what}, and left out: line {shown}")
    return objects


def read_steps(path: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """The lines of a run's steps that count, in the order of writing; each has ``step`` and ``metrics``.

    A line of step N removes the lines before it of later steps: the run has gone back to N. Lines of one step stay side
    by side.
    """
    kept: list[dict[str, Any]] = []
    for line in read_lines(path, problems, step=int, metrics=dict):
        while kept and kept[-1]["step"] > line["step"]:
            kept.pop()
        kept.append(line)
    return kept
