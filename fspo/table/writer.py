"""Writes the table of responses: an append survives a kill, and a step that comes again replaces its rows."""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fspo.reading import open_regular
from fspo.table.parts import (
    BOOL,
    COLUMNS,
    FLOAT,
    FORMAT,
    GROUP_ROWS,
    MOST_RANKS,
    NEEDED,
    RUN,
    TEMPORARY,
    TWICE,
    Part,
    arrow_schema,
    part_of,
    parts_of,
    read_stream,
    steps_of,
    unreadable,
)

_PART_ROWS: Final = 2**16
_PART_APPENDS: Final = 64
#: So many parts of one size are merged into one, which multiplies what is written by log_4 of the number of parts.
_FAN: Final = 4
_LARGEST_ROWS: Final = 2**18


class TableWriter:
    """Writes the rows of one rank into a folder.

    What :meth:`append` has written survives a kill of the process. Steps are appended in order; a step that comes
    again, or an earlier one, replaces all rows of this writer's run and rank from it on. Without ``first_step`` the
    files then say so (:data:`TWICE`), and every reader names it.

    Args:
        folder: Made if it is not there. It holds nothing but tables.
        meta: Metadata of each file: ``loss``, ``precision``, ``rule`` (``known`` or ``unknown``) and the like.
        run: The same on all ranks of a start, another one for each start; letters, digits, ``.``, ``_`` and ``-``.
        rank, ranks: Which of how many ranks that write different responses this is.
        first_step: The folder is that of one training, which continues at this step: rows from it on, of whatever
            earlier start, go. None: other starts in the folder are left alone.
        part_rows, part_appends: A part is closed when it has so many rows, or so many appends.

    Raises:
        ValueError: If ``run`` cannot stand in the name of a file.
    """

    def __init__(
        self,
        folder: str | Path,
        meta: Mapping[str, str],
        *,
        run: str,
        rank: int = 0,
        ranks: int = 1,
        first_step: int | None = None,
        part_rows: int = _PART_ROWS,
        part_appends: int = _PART_APPENDS,
    ) -> None:
        if not RUN.fullmatch(run):
            raise ValueError(f"run={run!r}: must be at most 100 letters, digits, '.', '_' and '-', no mark first")
        if not 0 <= rank < ranks <= MOST_RANKS:
            raise ValueError(f"rank={rank}: must be from 0 to ranks - 1, and ranks={ranks} at most {MOST_RANKS}")
        own = {"run": run, "rank": str(rank), "ranks": str(ranks)}
        if first_step is not None:
            own["first_step"] = str(first_step)
        self._folder, self._run, self._rank = Path(folder), run, rank
        self._schema = arrow_schema().with_metadata({**meta, **own, **FORMAT})
        self._replaces = first_step is not None  # a step that comes again replaces the first, as it should
        self._limits = part_rows, part_appends
        self._stream: _Stream | None = None
        self._unclosed: list[Part] = []
        self._last, self._merged_from = (-1, -1), 0
        #: What a kill has cut off, with its file.
        self.problems: list[str] = []
        self._folder.mkdir(parents=True, exist_ok=True)
        self._parts, foreign = self._recover(first_step is not None, ranks)
        self._number = max((part.last for part in self._parts), default=-1) + 1
        if first_step is not None:
            self._drop([*foreign, *self._parts], first_step)
        elif self._parts:  # whatever these have is replaced if it comes again
            self._last = max(steps_of(part.path)[1] for part in self._parts), 2**31
        self._process = os.getpid()

    def append(self, rows: Mapping[str, Any]) -> None:
        """Write rows: those of one mini-batch, or of several in order.

        Args:
            rows: A column of :data:`COLUMNS` each, [B], or one value for all rows; those of :data:`NEEDED` must be
                there. With no rows, and single values of step, update and minibatch, a row with L = 0 is written: this
                rank has seen the mini-batch.

        Raises:
            ValueError: If a column is unknown, missing, or of another length; nothing is written then.
            OSError: If the file cannot be written; the table holds what it held before.
        """
        batch = self._batch(rows)
        steps, updates = (batch.column(name).to_numpy() for name in ("step", "update"))
        if (np.diff(steps) < 0).any():
            raise ValueError("step: must not fall within the rows of one append")
        if (int(steps[0]), int(updates[0])) <= self._last:
            self._close_stream()
            self._drop(self._parts, int(steps[0]))
            if not self._replaces:
                again = {TWICE: f"step {steps[0]}, update {updates[0]} after step {self._last[0]}"}
                self._schema = self._schema.with_metadata(self._schema.metadata | again)
        if self._stream is None:
            atexit.register(self._at_exit)
            name = f"_responses-{self._run}-{self._rank:05d}-{self._number:06d}.arrow"
            self._stream, self._number = _Stream(self._folder / name, self._schema), self._number + 1
        self._stream.append(batch)
        self._last = int(steps[-1]), int(updates[-1])
        if self._stream.rows >= self._limits[0] or self._stream.appends >= self._limits[1]:
            # The rows are on the disk: a part that cannot be closed now, for want of room, is closed with the next one.
            with contextlib.suppress(*unreadable()):
                self._close_stream()
                self._merge()

    def close(self) -> None:
        """Close the open part. A later append opens another one."""
        if os.getpid() != self._process:  # a fork of the process that writes
            return
        atexit.unregister(self._at_exit)
        self._close_stream()
        self._merge()

    def _at_exit(self) -> None:
        with contextlib.suppress(OSError):  # a removed folder, or no room: readers have the rows of an open part, too
            self.close()

    def _batch(self, rows: Mapping[str, Any]) -> Any:
        import pyarrow as pa

        if unknown := sorted(rows.keys() - COLUMNS.keys()):
            raise ValueError(f"{', '.join(unknown)}: no column of the table; fspo.table.COLUMNS names them")
        if missing := [name for name in NEEDED if name not in rows]:
            raise ValueError(f"{', '.join(missing)}: must be among the columns of an append")
        # NaN of a column of true and false stands for unknown, and numpy takes it for true.
        kinds = {name: FLOAT if COLUMNS[name] == BOOL else COLUMNS[name] for name in rows}
        values = {name: np.asarray(value, kinds[name]) for name, value in rows.items()}
        lengths = {len(value) for value in values.values() if value.ndim}
        if len(lengths) > 1 or any(value.ndim > 1 for value in values.values()):
            raise ValueError(f"columns have {sorted(lengths)} rows: must be one-dimensional and of one length")
        if (count := lengths.pop() if lengths else 1) == 0:
            if any(values[name].ndim for name in ("step", "update", "minibatch")):
                raise ValueError("step, update and minibatch must be single values where there are no rows")
            count = 1
            values = {name: values[name] for name in ("step", "update", "minibatch")} | {"L": np.asarray(0, np.int32)}
        arrays = []
        for name, kind in zip(self._schema.names, self._schema.types, strict=True):
            if name not in values:
                arrays.append(pa.nulls(count, kind))
            else:
                column = np.broadcast_to(values[name], count) if values[name].ndim == 0 else values[name]
                of_float = pa.types.is_boolean(kind)
                array = pa.array(column, pa.float32() if of_float else kind, from_pandas=True)  # NaN and None are null
                arrays.append(array.cast(kind) if of_float else array)
        return pa.record_batch(arrays, schema=self._schema)

    def _close_stream(self) -> None:
        if self._stream is not None:
            part = None if self._stream.lost else part_of(self._stream.path)
            self._stream.close()
            self._stream = None
            if part is not None:
                self._unclosed.append(part)
        while self._unclosed:
            closed = self._closed(self._unclosed[0])
            self._unclosed.pop(0)
            if closed is not None:
                self._parts.append(closed)

    def _closed(self, part: Part) -> Part | None:
        """Make a closed part of a stream, which is deleted; None if it holds no row."""
        table, problem = read_stream(part.path)
        if problem:
            self.problems.append(problem)
        closed = self._write([table], part) if table is not None and table.num_rows else None
        part.path.unlink()
        return closed

    def _write(self, tables: Iterable[Any], *parts: Part) -> Part:
        """One closed part in the place of others, complete or absent."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        run, rank, first, last = parts[0].run, parts[0].rank, parts[0].first, parts[-1].last
        path = self._folder / f"responses-{run}-{rank:05d}-{first:06d}-{last:06d}.parquet"
        temporary = path.with_name(f"_{path.name}.tmp")
        groups = _grouped(tables)
        first_group = next(groups)
        # Only what repeats is worth a dictionary; only step is searched by.
        types = [(f.name, f.type) for f in first_group.schema]
        names = [name for name, kind in types if pa.types.is_string(kind) or pa.types.is_integer(kind)]
        options = {"compression": "zstd", "use_dictionary": names, "write_statistics": ["step"]}
        try:
            with temporary.open("wb") as file:
                with pq.ParquetWriter(file, first_group.schema, **options) as writer:
                    for group in itertools.chain([first_group], groups):
                        writer.write_table(group, row_group_size=GROUP_ROWS)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(self._folder)
        return Part(path, run, rank, first, last, True)

    def _merge(self) -> None:
        """Merge the newest parts while so many are of one size; the number of files grows like a logarithm."""
        while len(merged := self._of_one_size()) == _FAN:
            try:
                part = self._write(_tables(merged), *merged)
            except unreadable():  # a damaged part, which readers name, or a full disk: these stay as they are
                self._merged_from = len(self._parts)
                return
            self._parts[-_FAN:] = [part]
            for old in merged:
                old.path.unlink()

    def _of_one_size(self) -> list[Part]:
        """The newest parts that hold about as many streams as the last one and are small, at most so many."""
        sizes: list[int] = []
        for part in reversed(self._parts[self._merged_from :]):
            sizes.append(int(math.log(part.last - part.first + 1.5, _FAN)))
            if len(sizes) > _FAN or sizes[-1] != sizes[0] or steps_of(part.path)[2] > _LARGEST_ROWS // _FAN:
                sizes.pop()
                break
        return self._parts[len(self._parts) - len(sizes) :]

    def _recover(self, whole_folder: bool, ranks: int) -> tuple[list[Part], list[Part]]:
        """Remove what a kill has left, and close its streams; the parts of this run and rank, and of earlier starts."""

        def ours(run: str, rank: int) -> bool:
            # Each rank cleans up after its own number, the first one after those that nobody has any more.
            if whole_folder:
                return rank == self._rank or (self._rank == 0 and rank >= ranks)
            return (run, rank) == (self._run, self._rank)

        for path in self._folder.iterdir():
            named = TEMPORARY.fullmatch(path.name)
            if named and ours(named[1], int(named[2])):
                path.unlink()
        counted, superseded = parts_of(self._folder)
        for part in superseded:
            if ours(part.run, part.rank):
                part.path.unlink()
        parts: list[Part | None] = []
        for part in counted:
            if ours(part.run, part.rank):
                parts.append(part if part.closed else self._closed(part))
        left = [part for part in parts if part is not None]
        own = [part for part in left if (part.run, part.rank) == (self._run, self._rank)]
        return own, [part for part in left if part not in own]

    def _drop(self, parts: list[Part], step: int) -> None:
        """Drop the rows from a step on, the newest first, so that a kill leaves a beginning of what there was."""
        for part in sorted(parts, key=lambda part: -steps_of(part.path)[0]):
            lowest, highest, _ = steps_of(part.path)
            if highest < step:
                continue
            if lowest >= step:
                part.path.unlink()
            else:
                try:
                    self._write((_below(table, step) for table in _tables([part])), part)
                except unreadable() as error:
                    what = f"its rows from step {step} on cannot be taken out ({' '.join(str(error).split())[:200]})"
                    raise OSError(errno.EIO, f"{what}; move the file away if it is damaged", str(part.path)) from error
        self._parts, self._merged_from = [part for part in self._parts if part.path.exists()], 0
        _sync(self._folder)


class _Stream:
    """The open part: an Arrow stream, to which each append writes a batch at once."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.rows, self.appends = path, 0, 0
        self._head: Any = schema.serialize()
        self._size = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    @property
    def lost(self) -> bool:
        """Whether the file has been deleted meanwhile."""
        return os.fstat(self._file).st_nlink == 0

    def append(self, batch: Any) -> None:
        if self.lost:
            remedy = "each process that writes at the same time needs a rank= or a run= of its own"
            raise OSError(errno.ENOENT, f"another process has closed or removed it; {remedy}", str(self.path))
        try:
            size = self._size
            for content in (batch.serialize(),) if size else (self._head, batch.serialize()):
                left = memoryview(content)
                while left:
                    left = left[os.write(self._file, left) :]
                size += len(memoryview(content))
        except OSError:  # such as a full disk: what comes later must not stand behind half a batch
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size, self.rows, self.appends = size, self.rows + batch.num_rows, self.appends + 1

    def close(self) -> None:
        os.close(self._file)


def _sync(folder: Path) -> None:
    """Make the names of a folder survive the loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _grouped(tables: Iterable[Any]) -> Iterator[Any]:
    """The same rows in tables that are worth a row group each."""
    import pyarrow as pa

    waiting: list[Any] = []
    for table in tables:
        waiting.append(table)
        if sum(one.num_rows for one in waiting) >= GROUP_ROWS:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _tables(parts: Sequence[Part]) -> Iterator[Any]:
    """The rows of closed parts, which may have different columns, with all of these."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = [pq.read_schema(part.path) for part in parts]
    metadata = {key: value for one in schemas for key, value in (one.metadata or {}).items()}
    schema = pa.unify_schemas([one.remove_metadata() for one in schemas]).with_metadata(metadata)
    for part in parts:
        with open_regular(part.path) as file:
            for batch in pq.ParquetFile(file).iter_batches(GROUP_ROWS):
                columns = [
                    batch.column(f.name) if f.name in batch.schema.names else pa.nulls(len(batch), f.type)
                    for f in schema
                ]
                yield pa.Table.from_arrays(columns, schema=schema)


def _below(table: Any, step: int) -> Any:
    """The rows before a step."""
    import pyarrow.compute as pc

    return table.filter(pc.less(table.column("step"), step))
