"""The table of responses: a row for each response and mini-batch, in Parquet files that are complete or absent.

``responses-RUN-RANK-FIRST.parquet`` holds what one rank has written from step FIRST on, about 16,384 rows. Each append
writes the rank's newest file anew under a hidden name and renames it: a kill costs no more than the append in progress,
and what an append replaces never counts beside it. The metadata entry ``last`` of a file is the last step and update
that its rank has ended, so what lies at or below the smallest of these is whole. ``pandas.read_parquet(FOLDER)`` reads
all files. The layout is defined here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SCHEMA: Final = pa.schema(
    [
        ("step", pa.int32()),  # of the rollout batch
        ("update", pa.int32()),  # index of the mini-batch within the rollout batch
        ("minibatch", pa.int32()),  # fspo.audit.minibatch_numbers: 0 before any weight has moved since pi_old
        ("row", pa.int32()),  # position of the response in the rollout batch
        ("S", pa.float32()),  # sum over the tokens of log pi - log pi_old, nats; null: the response is left out
        ("L", pa.int32()),  # tokens of the response
        ("A", pa.float32()),
        ("inside", pa.float32()),  # share inside the band, whatever the sign of A, in [0, 1]; null: no rule is known
        ("kept", pa.float32()),  # share of the gradient that is kept at the row's A, in [0, 1]; null: no rule is known
        ("weight", pa.float32()),  # importance weight without its clip
        ("truncated", pa.float32()),  # 1: cut at the maximum length
        ("prompt", pa.string()),  # the prompt group
        ("id", pa.string()),  # joins verl's dumps
        ("data_source", pa.string()),
        ("reward", pa.float32()),
        ("rollout_weight", pa.float32()),  # weight of the rollout correction, the mean over the tokens
    ]
)
"""The columns of every file, null where a value is not known."""

FOLDER: Final = "responses"
"""Folder of the table in a run folder."""

_NAME: Final = re.compile(r"responses-([A-Za-z0-9][A-Za-z0-9._-]{0,99})-(\d{5})-(\d{9})\.parquet")
_FILE_ROWS: Final = 2**14
_UNREADABLE: Final = (OSError, ValueError, KeyError, pa.ArrowException)
_WHOLE: Final = [column.name for column in SCHEMA if pa.types.is_integer(column.type)]
_TEXT: Final = [column.name for column in SCHEMA if pa.types.is_string(column.type)]

Rows = dict[str, npt.NDArray[Any]]
"""Columns of :data:`SCHEMA`, [B] each: int64, -1 where a value is not known; float32, NaN; texts, None."""


def as_rows(columns: Rows) -> Rows:
    """Columns of numbers in the types of :data:`Rows`."""
    return {name: values.astype(np.int64 if name in _WHOLE else np.float32) for name, values in columns.items()}


#: What a mini-batch without a response of this rank has.
NO_ROWS: Final = as_rows({name: np.empty(0) for name in ("S", "L", "A")})


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several sets, each with columns of its own, S among them: not known where a set lacks a column."""

    def column(name: str, part: Rows) -> npt.NDArray[Any]:
        unknown: Any = np.int64(-1) if name in _WHOLE else None if name in _TEXT else np.float32(np.nan)
        return part[name] if name in part else np.full(len(part["S"]), unknown)

    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.concatenate([column(name, part) for part in parts]) for name in names}


class TableWriter:
    """Writes the rows of one rank.

    What :meth:`append` has written survives a kill of the process. A step that comes again, or an earlier one, replaces
    all rows of this run and rank from it on. A newest file that is damaged is set aside, as FILE.damaged.

    Args:
        folder: Made if it is not there.
        meta: Metadata of each file: ``loss``, ``rule`` (``known``, ``own`` or ``unknown``) and the like.
        run: The same on all ranks of a start, another one for each start; letters, digits, ``.``, ``_`` and ``-``.
        rank, ranks: Which of how many ranks that write different responses this is.
        first_step: The run goes on here: rows of this step and later ones go.

    Raises:
        ValueError: If ``run`` cannot stand in the name of a file.
        OSError: If the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | Path,
        meta: Mapping[str, str],
        run: str,
        rank: int = 0,
        ranks: int = 1,
        first_step: int | None = None,
    ) -> None:
        self._folder, self._begin = Path(folder), f"responses-{run}-{rank:05d}-"
        if not _NAME.fullmatch(f"{self._begin}{0:09d}.parquet"):
            raise ValueError(f"run={run!r}: must be at most 100 letters, digits, '.', '_' and '-', no mark first")
        self._meta = {**meta, "ranks": str(ranks)}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._not_synced: set[Path] = set()
        for left in self._folder.glob(f"_{self._begin}*.tmp"):  # by a kill
            left.unlink()
        self._open_newest()
        if first_step is not None:
            self._go_back_to(first_step)

    def append(self, rows: Mapping[str, Any]) -> bool:
        """Write rows of one step: those of a mini-batch, or of several.

        Args:
            rows: A column of :data:`SCHEMA` each, [B], or one value for all rows; step and update must be there.
                With columns of no entries this rank has seen the mini-batch, and had no response.

        Returns:
            Whether the step had come before, so that what was recorded from it on is replaced.

        Raises:
            KeyError: If a column is unknown or missing.
            ValueError: If a step is negative, or has more digits than the name of a file.
            OSError: If the file cannot be written, or another process has written it; the table holds what it held.
        """
        if unknown := sorted(rows.keys() - set(SCHEMA.names)):
            raise KeyError(f"{', '.join(unknown)}: no column of the table, which has {', '.join(SCHEMA.names)}")
        count = next((len(column) for column in rows.values() if np.ndim(column)), 1)
        first, last = ((int(end(rows["step"])), int(end(rows["update"]))) for end in (np.min, np.max))
        if not 0 <= first[0] <= last[0] < 10**9:
            raise ValueError(f"step={first[0]}: must be a number of rollout batches, from 0 to 10**9 - 1")
        arrays = [
            # NaN and None are null.
            pa.array(np.broadcast_to(rows[column.name], count), column.type, from_pandas=True)
            if column.name in rows
            else pa.nulls(count, column.type)
            for column in SCHEMA
        ]
        if again := first <= self._last:
            self._go_back_to(first[0])
        file = self._file
        if file is None or self._rows.num_rows >= _FILE_ROWS:
            file = self._folder / f"{self._begin}{first[0]:09d}.parquet"
        kept = self._rows if file == self._file else SCHEMA.empty_table()  # the same: one step of very many rows
        self._write(file, pa.concat_tables([kept, pa.table(arrays, schema=SCHEMA)]), last)
        return again

    def sync(self) -> None:
        """Bring to the disk what was appended, so that it outlives a loss of power as a checkpoint does."""
        for path in (*self._not_synced, self._folder):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        self._not_synced.clear()

    def _open_newest(self) -> None:
        """Take in the newest file of an earlier process, to append to it; one that is damaged is set aside."""
        self._file: Path | None = None
        self._rows, self._last, self._version = SCHEMA.empty_table(), (-1, -1), (0, 0)
        for file in sorted(_files(self._folder, self._begin), reverse=True):
            try:
                self._rows, _, self._last = _read(file, SCHEMA.names)
                self._file, self._version = file, _version(file)
                return
            except _UNREADABLE as error:
                aside = file.with_name(f"{file.name}.damaged")
                os.replace(file, aside)
                print(f"fspo.table: {file} cannot be read, and is now {aside.name}: {error}", file=sys.stderr)

    def _go_back_to(self, step: int) -> None:
        """Drop the rows from a step on, the newest file first, so that a kill leaves a beginning of what there was."""
        for path, (_, _, first) in sorted(_files(self._folder, self._begin).items(), reverse=True):
            if first >= step:
                path.unlink()
                self._not_synced.discard(path)
        self._open_newest()
        if self._file is not None and self._last[0] >= step:
            self._write(self._file, self._rows.filter(pc.less(self._rows["step"], step)), (step - 1, 2**31 - 1))

    def _write(self, file: Path, rows: pa.Table, last: tuple[int, int]) -> None:
        if file == self._file and _version(file) != self._version:
            remedy = "each process that writes at the same time needs a rank= or a run= of its own"
            raise OSError(f"{file}: another process has written it; {remedy}")
        hidden = file.with_name(f"_{file.name}.tmp")
        table = rows.replace_schema_metadata({**self._meta, "last": f"{last[0]} {last[1]}"})
        try:
            pq.write_table(table, hidden, compression="zstd", use_dictionary=[*_WHOLE, *_TEXT], write_statistics=False)
            version = _version(hidden)
            os.replace(hidden, file)
        finally:
            hidden.unlink(missing_ok=True)
        self._file, self._rows, self._last, self._version = file, rows, last, version
        self._not_synced.add(file)


@dataclass
class Table:
    """The rows of one start, joined over its ranks, in the order of step, update and row.

    Attributes:
        columns: Those of :data:`SCHEMA`, or those asked for, as :data:`Rows`; a text is a number, -1 where not known.
        meta: Metadata of the run's newest file.
        run: Which start of several.
        others: The other starts in the folder.
        left_out: Responses without S, which are in none of the columns, but for those that a run skips for A = 0.
        last: (step, update) of the last mini-batch that every rank has written; None if there is none.
        problems: What is missing or cannot be read, each with its file.
    """

    columns: Rows = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    run: str = ""
    others: list[str] = field(default_factory=list)
    left_out: int = 0
    last: tuple[int, int] | None = None
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns.get("S", ()))

    def take(self, rows: pa.Table) -> None:
        """Make ``columns`` of the rows with S, in their order, and count the others in ``left_out``."""
        without_S = rows.filter(pc.is_null(rows["S"]))
        skipped = pc.sum(pc.equal(without_S["A"], 0)).as_py() or 0 if self.meta.get("without_S") == "A = 0" else 0
        self.left_out = without_S.num_rows - skipped
        columns_B = columns_of(rows.filter(pc.is_valid(rows["S"])))
        order_B = np.lexsort([columns_B[name] for name in ("row", "update", "step") if name in columns_B])
        self.columns = {name: values[order_B] for name, values in columns_B.items()}


def holds_table(folder: str | Path) -> bool:
    """Whether a folder holds a file of a table."""
    return bool(_files(Path(folder)))


def read_table(
    path: str | Path, run: str = "", columns: Iterable[str] | None = None, after: tuple[int, int] | None = None
) -> Table:
    """The rows of all mini-batches that every rank wrote, also while the table is being written.

    A mini-batch that some rank lacks is left out with all that follow; ``problems`` names the rank if it lags by more
    than a step.

    Args:
        path: A folder that a :class:`TableWriter` writes to, or a run folder that holds one (:data:`FOLDER`).
        run: Which start to read, where the folder holds several; the newest by default.
        columns: Names, beside step, update, S and A; None: all.
        after: Only rows with a later (step, update).
    """
    folder, table = Path(path), Table()
    if (folder / FOLDER).is_dir():
        folder /= FOLDER
    by_age = sorted(_files(folder).items(), key=lambda item: item[0].stat().st_mtime_ns, reverse=True)
    runs = list(dict.fromkeys(name for _, (name, _, _) in by_age))
    table.run = run or next(iter(runs), "")
    table.others = [name for name in runs if name != table.run]
    files = sorted((rank, first, path) for path, (name, rank, first) in by_age if name == table.run)
    if not files:
        table.problems.append(f"{folder}: holds no file responses-{run or 'RUN'}-*.parquet")
    names = None if columns is None else [*dict.fromkeys(["step", "update", "S", "A", *columns])]
    parts: list[pa.Table] = []
    last: dict[int, tuple[int, int]] = {}
    for rank, _, file in files:
        try:
            rows, table.meta, last[rank] = _read(file, names)
            parts.append(rows)
        except _UNREADABLE as error:
            table.problems.append(f"{file}: cannot be read, and is left out ({error})")
    if not parts:
        return table
    ranks = int(table.meta["ranks"])
    if missing := sorted(set(range(ranks)) - last.keys()):
        table.problems.append(f"{folder}: of {ranks} ranks, {', '.join(map(str, missing))} wrote nothing")
    table.last = min(last.values())
    if max(last.values())[0] > table.last[0] + 1:
        rank = min(last, key=lambda one: last[one])
        what = f"rank {rank} ends at step {last[rank][0]}; what others have after it is left out"
        table.problems.append(f"{folder}: {what}")
    rows = pa.concat_tables(parts)
    place = pc.add(pc.multiply(rows["step"].cast(pa.int64()), 2**31), rows["update"].cast(pa.int64()))
    first, end = ((step * 2**31 + update) for step, update in (after or (-1, 0), table.last))
    table.take(rows.filter(pc.and_(pc.greater(place, first), pc.less_equal(place, end))))
    return table


def columns_of(rows: pa.Table) -> Rows:
    """Columns of numpy, as :class:`Table` has them."""
    columns: Rows = {}
    for name, values in zip(rows.schema.names, rows.columns, strict=True):
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if name in _TEXT:
            values = values.combine_chunks().dictionary_encode().indices
        number = values.type if pa.types.is_floating(values.type) else pa.float32()
        kind, unknown = (pa.int64(), -1) if pa.types.is_integer(values.type) else (number, float("nan"))
        columns[name] = np.asarray(pc.fill_null(values.cast(kind), unknown).to_numpy(zero_copy_only=False))
    return columns


def _files(folder: Path, begin: str = "") -> dict[Path, tuple[str, int, int]]:
    """Files of a table whose names begin so, with run, rank and first step of each."""
    names = [path for path in folder.iterdir() if path.name.startswith(begin)] if folder.is_dir() else []
    named = {path: _NAME.fullmatch(path.name) for path in names}
    return {path: (match[1], int(match[2]), int(match[3])) for path, match in named.items() if match}


def _read(file: Path, names: list[str] | None) -> tuple[pa.Table, dict[str, str], tuple[int, int]]:
    """Rows, metadata, and the last (step, update) that the file's rank has ended."""
    rows = pq.ParquetFile(file).read(columns=names)
    meta = {key.decode(): value.decode() for key, value in rows.schema.metadata.items()}
    step, update = meta["last"].split()
    return rows.replace_schema_metadata(), meta, (int(step), int(update))


def _version(file: Path) -> tuple[int, int]:
    """Another one for each file that was ever put under a name."""
    stat = os.stat(file)
    return stat.st_ino, stat.st_mtime_ns
