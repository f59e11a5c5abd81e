"""The files of a run folder: their names, and the fields and readers of their records.

The responses of a run are a table (:mod:`fspo.table`). A reader that gets a list ``problems`` adds what is wrong, by
file and line; without the list it leaves that out in silence. What may be wrong with a file that comes from elsewhere
is bounded by :mod:`fspo.reading`. Importing this module does not import torch: the launching process reads run folders
too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from fspo.reading import (
    COUNT,
    NAME,
    NULL,
    NUMBER,
    SWITCH,
    TEXT,
    WHOLE,
    Kind,
    check_fields,
    list_of,
    mapping_of,
    object_of,
    parse_object,
    read_lines,
    read_text,
    wrong_fields,
)

T = TypeVar("T")

METRICS_FILE: Final = "metrics.jsonl"
#: Files of a run folder that grow with its steps.
STEP_FILES: Final = (METRICS_FILE,)
INFO_FILE: Final = "run.json"
CONFIG_FILE: Final = "config.yaml"


def read_object(path: Path, problems: list[str] | None = None) -> dict[str, Any]:
    """The JSON object that a file holds; empty if the file is missing, cannot be read or holds something else."""
    problems = [] if problems is None else problems
    try:
        return parse_object(read_text(path))
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
    except ValueError as error:
        problems.append(f"{path}: {error}")
    return {}


_START: Final = {"started": NAME, "ended": NAME, "status": NAME, "error": TEXT}
#: What run.json may hold, as far as anything reads it (docs/runs.md).
RUN_FIELDS: Final[dict[str, Kind]] = {
    "algo": NAME,
    "seed": WHOLE | NULL,
    "clip_values": NAME,
    "status": NAME,
    "experiment": NAME | NULL,
    "loss": object_of({"loss_mode": NAME}),  # a user's own has any settings
    "clip_values_measured": list_of(object_of({"c_low": NUMBER, "c_high": NUMBER}, needed=("c_low", "c_high"))),
    "validation_problems": COUNT | mapping_of(COUNT),
    "versions": mapping_of(NAME),
    "commit": NAME | NULL,
    "dirty": SWITCH | NULL,
    "code": object_of({"id": NAME}, needed=("id",)),
    "command": list_of(TEXT),
    "overrides": list_of(TEXT),
    "resume_from_path": TEXT | NULL,
    "changed": list_of(object_of({})),
    "starts": list_of(object_of(_START, needed=("started",))),
}


def read_info(folder: Path, problems: list[str] | None = None) -> dict[str, Any]:
    """``run.json`` of a run folder without fields of another kind than :data:`RUN_FIELDS` says."""
    info = read_object(folder / INFO_FILE, problems)
    wrong = wrong_fields(info, RUN_FIELDS)
    if problems is not None:
        problems += [f"{folder / INFO_FILE}: {name} {sentence}" for name, sentence in wrong.items()]
    return {name: value for name, value in info.items() if name not in wrong}


def append_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append records to a JSON Lines file, a line each, by one write: a kill costs at most the last line.

    That line has no end then, and gets one here; readers name and skip it.
    """
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(text.encode())


def numbered_lines(path: Path, problems: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line of a JSON Lines file.

    A line that is no JSON object is left out. A kill may have cut one, even in the middle: a resumed run ends it.
    """
    return read_lines(path, [] if problems is None else problems, lambda line: line)


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSON Lines file; none if it is not there. See :func:`numbered_lines`."""
    return [line for _, line in numbered_lines(path)]


def read_steps(path: Path, problems: list[str] | None, read: Callable[[dict[str, Any]], T]) -> list[tuple[int, int, T]]:
    """Line number, step and what ``read`` makes of each line that counts, in the order of writing.

    A line of step N removes the lines before it of later steps: the run has gone back to N. Lines of one step stay side
    by side. A line without a step, or one that ``read`` refuses (:func:`fspo.reading.read_lines`), is named in
    ``problems`` and left out.
    """
    kept: list[tuple[int, int, T]] = []

    def of_line(line: dict[str, Any]) -> tuple[int, T]:
        return check_fields(line, {"step": COUNT}, needed=("step",))["step"], read(line)

    for number, (step, content) in read_lines(path, [] if problems is None else problems, of_line):
        while kept and kept[-1][1] > step:
            kept.pop()
        kept.append((number, step, content))
    return kept


def numbered_steps(path: Path, problems: list[str] | None = None) -> list[tuple[int, dict[str, Any]]]:
    """Line number and record of :func:`read_steps`."""
    return [(number, line) for number, _, line in read_steps(path, problems, lambda line: line)]
