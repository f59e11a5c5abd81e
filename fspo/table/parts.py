"""Columns of the table of responses, and the parts that its folder holds."""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.reading import open_regular

OCTAVES: Final = 18
"""Positions t = 1, 2, 4, ..., 2**17 at which the sums over the first t tokens are kept."""

INT, FLOAT, BOOL, TEXT = (np.dtype(kind) for kind in (np.int32, np.float32, np.bool_, np.object_))

COLUMNS: Final[dict[str, np.dtype[Any]]] = {
    "step": INT,  # of the rollout batch
    "update": INT,  # index of the mini-batch within the rollout batch
    "minibatch": INT,  # fspo.audit.minibatch_numbers: 0 before any weight has moved since pi_old
    "row": INT,  # position of the response in the rollout batch
    "S": FLOAT,  # sum over the tokens of log pi - log pi_old, nats; null: the response is left out
    "L": INT,  # tokens of the response; 0: a row that says that the mini-batch had no response on this rank
    "A": FLOAT,
    "inside": FLOAT,  # share inside the band, whatever the sign of A, in [0, 1]; null: the rule is not known
    "kept": FLOAT,  # share of the gradient that is kept at the row's A, in [0, 1]; null: the rule is not known
    "weight": FLOAT,  # importance weight without its clip
    "truncated": BOOL,  # cut at the maximum length
    "Q": FLOAT,  # sum of the squared log-ratios of the tokens
    **{f"S_{2**k}": FLOAT for k in range(OCTAVES)},  # S_t and Q_t: the same over the first t tokens, for t <= L
    **{f"Q_{2**k}": FLOAT for k in range(OCTAVES)},
    "prompt": TEXT,  # the prompt group
    "id": TEXT,  # joins verl's dumps
    "data_source": TEXT,
    "reward": FLOAT,
    "rollout_weight": FLOAT,  # weight of the rollout correction, the mean over the tokens
}
"""The schema of every file. A column that is not known is null; NaN is null."""

NEEDED: Final = ("step", "update", "minibatch", "S", "L")
"""Columns of every append, and of every :class:`Table`."""

FOLDER: Final = "responses"
"""Folder of the table in a run folder."""

FORMAT: Final = {"format": "fspo responses", "version": "1"}
#: Entry of a file's metadata: which mini-batch came twice, so that what was recorded first is gone.
TWICE: Final = "twice"
GROUP_ROWS: Final = 2**16
_MOST_STREAM_BYTES: Final = 2**30
MOST_RANKS: Final = 100_000
RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CLOSED: Final = re.compile(rf"responses-({RUN.pattern})-(\d{{5,9}})-(\d{{6,12}})-(\d{{6,12}})\.parquet")
_OPEN: Final = re.compile(rf"_responses-({RUN.pattern})-(\d{{5,9}})-(\d{{6,12}})\.arrow")
TEMPORARY: Final = re.compile(rf"_responses-({RUN.pattern})-(\d{{5,9}})-\d{{6,12}}-\d{{6,12}}\.parquet\.tmp")

Rows = dict[str, npt.NDArray[Any]]


def join_rows(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> Rows:
    """The rows of several sets, each with columns of its own, S among them: not known where a set lacks a column."""
    fillers: dict[str, Any] = {name: np.float32(np.nan) for part in parts for name in part}
    fillers |= {
        name: {"i": np.int64(-1), "O": None}.get(COLUMNS[name].kind, fillers[name])
        for name in fillers
        if name in COLUMNS
    }
    return {
        name: np.concatenate([part[name] if name in part else np.full(len(part["S"]), filler) for part in parts])
        for name, filler in fillers.items()
    }


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the table: whose it is, and the numbers of the streams that it holds."""

    path: Path
    run: str
    rank: int
    first: int
    last: int
    closed: bool


def part_of(path: Path) -> Part | None:
    """What the name of a file says; None if it is none of a table."""
    if named := _CLOSED.fullmatch(path.name):
        return Part(path, named[1], int(named[2]), int(named[3]), int(named[4]), True)
    if named := _OPEN.fullmatch(path.name):
        return Part(path, named[1], int(named[2]), int(named[3]), int(named[3]), False)
    return None


def leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def parts_of(folder: Path) -> tuple[list[Part], list[Part]]:
    """The parts of a folder that count, in the order of run, rank and number, and those that another supersedes."""
    by_rank: dict[tuple[str, int], list[Part]] = defaultdict(list)
    for part in filter(None, map(part_of, folder.iterdir() if folder.is_dir() else ())):
        if leads_nowhere(part.path):
            continue
        by_rank[part.run, part.rank].append(part)
    counted: list[Part] = []
    superseded: list[Part] = []
    for key in sorted(by_rank):
        last = -1
        for part in sorted(by_rank[key], key=lambda part: (part.first, -part.last, not part.closed)):
            (counted if part.last > last else superseded).append(part)
            last = max(last, part.last)
    return counted, superseded


@functools.cache
def arrow_schema() -> Any:
    import pyarrow as pa

    types = {INT: pa.int32(), FLOAT: pa.float32(), BOOL: pa.bool_(), TEXT: pa.string()}
    return pa.schema([(name, types[dtype]) for name, dtype in COLUMNS.items()])


def unreadable() -> tuple[type[Exception], ...]:
    """What pyarrow raises for a file that is no sound one of its kind."""
    import pyarrow as pa

    return OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError, pa.ArrowException


def read_stream(path: Path, names: list[str] | None = None) -> tuple[Any, str]:
    """The whole batches of an open part as a table, None if not even the schema is whole; and what is cut off."""
    import pyarrow as pa

    with open_regular(path) as file:
        content = file.read(_MOST_STREAM_BYTES + 1)
    if len(content) > _MOST_STREAM_BYTES:
        return None, f"{path}: is larger than {_MOST_STREAM_BYTES} bytes, and is left out"
    if not content:  # made, and nothing written yet
        return None, ""
    table, batches, source, position = None, [], pa.BufferReader(content), 0
    try:
        schema = pa.ipc.open_stream(pa.BufferReader(content)).schema
        fields = [i for i, name in enumerate(schema.names) if names is None or name in names]
        reader = pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
        table = reader.schema.empty_table()
        position = source.tell()
        while True:
            batch = reader.read_next_batch()
            batch.validate(full=True)
            batches.append(batch)
            position = source.tell()
    except StopIteration:
        position = source.tell()
    except unreadable():
        pass
    if batches:
        table = pa.Table.from_batches(batches)
    if position == len(content):
        return table, ""
    lost = f"its last {len(content) - position} bytes, after {len(batches)} whole appends, are left out"
    return table, f"{path}: {lost}: an append that a kill has cut, or that is still being written"


def steps_of(path: Path) -> tuple[int, int, int]:
    """Lowest and highest step of a closed part, and its rows; (-1, -1, 2**62) if it cannot be read."""
    stat = os.stat(path)
    return _steps_of_version(str(path), (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=2**14)
def _steps_of_version(path: str, version: tuple[int, ...]) -> tuple[int, int, int]:
    import pyarrow.parquet as pq

    try:
        with open_regular(Path(path)) as file:
            metadata = pq.ParquetFile(file).metadata
            groups = step_ranges(metadata)
            if not groups:
                return 0, -1, 0
            return min(low for low, _ in groups), max(high for _, high in groups), metadata.num_rows
    except unreadable():
        return -1, -1, 2**62


def step_ranges(metadata: Any) -> list[tuple[int, int]]:
    """Lowest and highest step of each row group; (-1, 2**62) where the file does not say."""
    ranges = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        statistics = next((one.statistics for one in columns if one.path_in_schema == "step"), None)
        if statistics is None or not statistics.has_min_max or not isinstance(statistics.min, int):
            ranges.append((-1, 2**62))
        else:
            ranges.append((int(statistics.min), int(statistics.max)))
    return ranges
