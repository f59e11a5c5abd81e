"""The table of responses: one row per response and mini-batch, which is all that a run or an audit records of a loss.

A *folder* holds the rows of one training, or of several starts that know nothing of each other. Its files are

* closed parts, ``responses-RUN-RANK-FIRST-LAST.parquet``: complete, compressed, merged into larger ones as they grow;
* one open part of each rank, ``_responses-RUN-RANK-NUMBER.arrow``: an Arrow stream that gains a batch with each append.

Parts are numbered by the stream that they were. A closed part supersedes the stream of its number, and every part whose
numbers it contains. A kill between writing, renaming and deleting therefore leaves nothing that counts twice: readers
leave out what is superseded, and the same writer removes it when it opens the folder again. ``pandas.read_parquet``
reads all closed parts of a folder in one line; names that begin with ``_`` are none of its files.

Names of columns stand in the file, so that a new column needs no new layout. pyarrow is imported where a file is
written or read, because every worker of verl imports this package. The layout is defined here.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.reading import MAX_WHOLE, open_regular

OCTAVES: Final = 18
"""Positions t = 1, 2, 4, ..., 2**17 at which the sums over the first t tokens are kept."""

_INT, _FLOAT, _BOOL, _TEXT = (np.dtype(kind) for kind in (np.int32, np.float32, np.bool_, np.object_))

COLUMNS: Final[dict[str, np.dtype[Any]]] = {
    "step": _INT,  # of the rollout batch
    "update": _INT,  # index of the mini-batch within the rollout batch
    "minibatch": _INT,  # fspo.audit.minibatch_numbers: 0 before any weight has moved since pi_old
    "row": _INT,  # position of the response in the rollout batch
    "S": _FLOAT,  # sum over the tokens of log pi - log pi_old, nats; null: the response is left out
    "L": _INT,  # tokens of the response; 0: a row that says that the mini-batch had no response on this rank
    "A": _FLOAT,
    "inside": _FLOAT,  # share inside the band, whatever the sign of A, in [0, 1]; null: the rule is not known
    "kept": _FLOAT,  # share of the gradient that is kept at the row's A, in [0, 1]; null: the rule is not known
    "weight": _FLOAT,  # importance weight without its clip
    "truncated": _BOOL,  # cut at the maximum length
    "Q": _FLOAT,  # sum of the squared log-ratios of the tokens
    **{f"S_{2**k}": _FLOAT for k in range(OCTAVES)},  # S_t and Q_t: the same over the first t tokens, for t <= L
    **{f"Q_{2**k}": _FLOAT for k in range(OCTAVES)},
    "prompt": _TEXT,  # the prompt group
    "id": _TEXT,  # joins verl's dumps
    "data_source": _TEXT,
    "reward": _FLOAT,
    "rollout_weight": _FLOAT,  # weight of the rollout correction, the mean over the tokens
}
"""The schema of every file. A column that is not known is null; NaN is null."""

NEEDED: Final = ("step", "update", "minibatch", "S", "L")
"""Columns of every append, and of every :class:`Table`."""

FOLDER: Final = "responses"
"""Folder of the table in a run folder."""

_FORMAT: Final = {"format": "fspo responses", "version": "1"}
_PART_ROWS: Final = 2**16
_PART_APPENDS: Final = 64
#: So many parts of one size are merged into one, which multiplies what is written by log_4 of the number of parts.
_FAN: Final = 4
_LARGEST_ROWS: Final = 2**18
_GROUP_ROWS: Final = 2**16
_MOST_ROWS: Final = 100_000_000
#: Of somebody's own file: the responses of a year of 8B training.
_MOST_OWN_ROWS: Final = 10_000_000
_MOST_STREAM_BYTES: Final = 2**30
_MOST_RANKS: Final = 100_000
_NAMED: Final = 10
#: Of a number: its square, summed over any run, is still a float, and it is one in single precision.
_LARGEST: Final = 1e30
_LISTINGS: Final = 10
_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CLOSED: Final = re.compile(rf"responses-({_RUN.pattern})-(\d{{5,9}})-(\d{{6,12}})-(\d{{6,12}})\.parquet")
_OPEN: Final = re.compile(rf"_responses-({_RUN.pattern})-(\d{{5,9}})-(\d{{6,12}})\.arrow")
_TEMPORARY: Final = re.compile(rf"_responses-({_RUN.pattern})-(\d{{5,9}})-\d{{6,12}}-\d{{6,12}}\.parquet\.tmp")


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


# ---------------------------------------------------------------------- parts


@dataclass(frozen=True, slots=True)
class _Part:
    """A file of the table: whose it is, and the numbers of the streams that it holds."""

    path: Path
    run: str
    rank: int
    first: int
    last: int
    closed: bool


def _part(path: Path) -> _Part | None:
    """What the name of a file says; None if it is none of a table."""
    if named := _CLOSED.fullmatch(path.name):
        return _Part(path, named[1], int(named[2]), int(named[3]), int(named[4]), True)
    if named := _OPEN.fullmatch(path.name):
        return _Part(path, named[1], int(named[2]), int(named[3]), int(named[3]), False)
    return None


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _parts(folder: Path) -> tuple[list[_Part], list[_Part]]:
    """The parts of a folder that count, in the order of run, rank and number, and those that another supersedes."""
    by_rank: dict[tuple[str, int], list[_Part]] = defaultdict(list)
    for part in filter(None, map(_part, folder.iterdir() if folder.is_dir() else ())):
        if _leads_nowhere(part.path):
            continue
        by_rank[part.run, part.rank].append(part)
    counted: list[_Part] = []
    superseded: list[_Part] = []
    for key in sorted(by_rank):
        last = -1
        for part in sorted(by_rank[key], key=lambda part: (part.first, -part.last, not part.closed)):
            (counted if part.last > last else superseded).append(part)
            last = max(last, part.last)
    return counted, superseded


# --------------------------------------------------------------------- writer


@functools.cache
def _schema() -> Any:
    import pyarrow as pa

    types = {_INT: pa.int32(), _FLOAT: pa.float32(), _BOOL: pa.bool_(), _TEXT: pa.string()}
    return pa.schema([(name, types[dtype]) for name, dtype in COLUMNS.items()])


class TableWriter:
    """Writes the rows of one rank into a folder.

    What :meth:`append` has written survives a kill of the process. Steps are appended in order; a step that comes
    again, or an earlier one, replaces all rows of this writer's run and rank from it on.

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
        if not _RUN.fullmatch(run):
            raise ValueError(f"run={run!r}: must be at most 100 letters, digits, '.', '_' and '-', no mark first")
        if not 0 <= rank < ranks <= _MOST_RANKS:
            raise ValueError(f"rank={rank}: must be from 0 to ranks - 1, and ranks={ranks} at most {_MOST_RANKS}")
        own = {"run": run, "rank": str(rank), "ranks": str(ranks)}
        if first_step is not None:
            own["first_step"] = str(first_step)
        self._folder, self._run, self._rank = Path(folder), run, rank
        self._schema = _schema().with_metadata({**meta, **own, **_FORMAT})
        self._limits = part_rows, part_appends
        self._stream: _Stream | None = None
        self._unclosed: list[_Part] = []
        self._last, self._merged_from = (-1, -1), 0
        #: What a kill has cut off, with its file.
        self.problems: list[str] = []
        self._folder.mkdir(parents=True, exist_ok=True)
        self._parts, foreign = self._recover(first_step is not None, ranks)
        self._number = max((part.last for part in self._parts), default=-1) + 1
        if first_step is not None:
            self._drop([*foreign, *self._parts], first_step)
        elif self._parts:  # whatever these have is replaced if it comes again
            self._last = max(_steps(part.path)[1] for part in self._parts), 2**31
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
        if self._stream is None:
            atexit.register(self._at_exit)
            name = f"_responses-{self._run}-{self._rank:05d}-{self._number:06d}.arrow"
            self._stream, self._number = _Stream(self._folder / name, self._schema), self._number + 1
        self._stream.append(batch)
        self._last = int(steps[-1]), int(updates[-1])
        if self._stream.rows >= self._limits[0] or self._stream.appends >= self._limits[1]:
            # The rows are on the disk: a part that cannot be closed now, for want of room, is closed with the next one.
            with contextlib.suppress(*_unreadable()):
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
        with contextlib.suppress(FileNotFoundError):  # somebody has removed the folder
            self.close()

    def _batch(self, rows: Mapping[str, Any]) -> Any:
        import pyarrow as pa

        if unknown := sorted(rows.keys() - COLUMNS.keys()):
            raise ValueError(f"{', '.join(unknown)}: no column of the table; fspo.table.COLUMNS names them")
        if missing := [name for name in NEEDED if name not in rows]:
            raise ValueError(f"{', '.join(missing)}: must be among the columns of an append")
        # NaN of a column of true and false stands for unknown, and numpy takes it for true.
        kinds = {name: _FLOAT if COLUMNS[name] == _BOOL else COLUMNS[name] for name in rows}
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
            self._stream.close()
            part, self._stream = _part(self._stream.path), None
            assert part is not None
            self._unclosed.append(part)
        while self._unclosed:
            closed = self._closed(self._unclosed[0])
            self._unclosed.pop(0)
            if closed is not None:
                self._parts.append(closed)

    def _closed(self, part: _Part) -> _Part | None:
        """Make a closed part of a stream, which is deleted; None if it holds no row."""
        table, problem = _read_stream(part.path)
        if problem:
            self.problems.append(problem)
        closed = self._write([table], part) if table is not None and table.num_rows else None
        part.path.unlink()
        return closed

    def _write(self, tables: Iterable[Any], *parts: _Part) -> _Part:
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
                        writer.write_table(group, row_group_size=_GROUP_ROWS)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(self._folder)
        return _Part(path, run, rank, first, last, True)

    def _merge(self) -> None:
        """Merge the newest parts while so many are of one size; the number of files grows like a logarithm."""
        while len(merged := self._of_one_size()) == _FAN:
            try:
                part = self._write(_tables(merged), *merged)
            except _unreadable():  # a damaged part, which readers name, or a full disk: these stay as they are
                self._merged_from = len(self._parts)
                return
            self._parts[-_FAN:] = [part]
            for old in merged:
                old.path.unlink()

    def _of_one_size(self) -> list[_Part]:
        """The newest parts that hold about as many streams as the last one and are small, at most so many."""
        sizes: list[int] = []
        for part in reversed(self._parts[self._merged_from :]):
            sizes.append(int(math.log(part.last - part.first + 1.5, _FAN)))
            if len(sizes) > _FAN or sizes[-1] != sizes[0] or _steps(part.path)[2] > _LARGEST_ROWS // _FAN:
                sizes.pop()
                break
        return self._parts[len(self._parts) - len(sizes) :]

    def _recover(self, whole_folder: bool, ranks: int) -> tuple[list[_Part], list[_Part]]:
        """Remove what a kill has left, and close its streams; the parts of this run and rank, and of earlier starts."""

        def ours(run: str, rank: int) -> bool:
            # Each rank cleans up after its own number, the first one after those that nobody has any more.
            if whole_folder:
                return rank == self._rank or (self._rank == 0 and rank >= ranks)
            return (run, rank) == (self._run, self._rank)

        for path in self._folder.iterdir():
            named = _TEMPORARY.fullmatch(path.name)
            if named and ours(named[1], int(named[2])):
                path.unlink()
        counted, superseded = _parts(self._folder)
        for part in superseded:
            if ours(part.run, part.rank):
                part.path.unlink()
        parts: list[_Part | None] = []
        for part in counted:
            if ours(part.run, part.rank):
                parts.append(part if part.closed else self._closed(part))
        left = [part for part in parts if part is not None]
        own = [part for part in left if (part.run, part.rank) == (self._run, self._rank)]
        return own, [part for part in left if part not in own]

    def _drop(self, parts: list[_Part], step: int) -> None:
        """Drop the rows from a step on, the newest first, so that a kill leaves a beginning of what there was."""
        for part in sorted(parts, key=lambda part: -_steps(part.path)[0]):
            lowest, highest, _ = _steps(part.path)
            if highest < step:
                continue
            if lowest >= step:
                part.path.unlink()
            else:
                try:
                    self._write((_below(table, step) for table in _tables([part])), part)
                except _unreadable() as error:
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

    def append(self, batch: Any) -> None:
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


def _unreadable() -> tuple[type[Exception], ...]:
    """What pyarrow raises for a file that is no sound one of its kind."""
    import pyarrow as pa

    return OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError, pa.ArrowException


def _grouped(tables: Iterable[Any]) -> Iterator[Any]:
    """The same rows in tables that are worth a row group each."""
    import pyarrow as pa

    waiting: list[Any] = []
    for table in tables:
        waiting.append(table)
        if sum(one.num_rows for one in waiting) >= _GROUP_ROWS:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _tables(parts: Sequence[_Part]) -> Iterator[Any]:
    """The rows of closed parts, which may have different columns, with all of these."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = [pq.read_schema(part.path) for part in parts]
    schema = pa.unify_schemas([one.remove_metadata() for one in schemas]).with_metadata(schemas[-1].metadata)
    for part in parts:
        with open_regular(part.path) as file:
            for batch in pq.ParquetFile(file).iter_batches(_GROUP_ROWS):
                columns = [
                    batch.column(f.name) if f.name in batch.schema.names else pa.nulls(len(batch), f.type)
                    for f in schema
                ]
                yield pa.Table.from_arrays(columns, schema=schema)


def _below(table: Any, step: int) -> Any:
    """The rows before a step."""
    import pyarrow.compute as pc

    return table.filter(pc.less(table.column("step"), step))


def _steps(path: Path) -> tuple[int, int, int]:
    """Lowest and highest step of a closed part, and its rows; (-1, -1, 2**62) if it cannot be read."""
    stat = os.stat(path)
    return _steps_of(str(path), (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=2**14)
def _steps_of(path: str, version: tuple[int, ...]) -> tuple[int, int, int]:
    import pyarrow.parquet as pq

    try:
        with open_regular(Path(path)) as file:
            metadata = pq.ParquetFile(file).metadata
            groups = _step_range_of_groups(metadata)
            if not groups:
                return 0, -1, 0
            return min(low for low, _ in groups), max(high for _, high in groups), metadata.num_rows
    except _unreadable():
        return -1, -1, 2**62


def _step_range_of_groups(metadata: Any) -> list[tuple[int, int]]:
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


# --------------------------------------------------------------------- reader


@dataclass
class Table:
    """The rows of one run, joined over its ranks, in the order of step, update and row.

    Attributes:
        columns: Those of :data:`NEEDED` and those asked for, [B] each. Whole numbers are int64, -1 where they are not
            known; numbers are float32 (float64 if the file has that), NaN where they are not known; true and false are
            1.0 and 0.0 (float32), NaN where that is not known; text is a code (int32), -1 where it is not known.
        texts: Of each column of text, the text of each code.
        meta: Metadata of the run's newest file.
        run: Which start of several.
        others: The other starts in the folder.
        ranks: Ranks that have written.
        expected: Ranks that there should be.
        left_out: Responses without S, which are in none of the columns.
        batches: (step, update) of all mini-batches that are there, int64 [M, 2], in order; one without responses, too.
        last: (step, update) of the last mini-batch that any rank has written; None if there is none.
        problems: What is missing, wrong or cannot be read, each with its file.
    """

    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    texts: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    run: str = ""
    others: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    expected: int = 0
    left_out: int = 0
    batches: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    last: tuple[int, int] | None = None
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns["S"]) if self.columns else 0


def holds_table(folder: str | Path) -> bool:
    """Whether a folder holds a file of a table."""
    folder = Path(folder)
    return folder.is_dir() and any(map(_part, folder.iterdir()))


def read_table(
    path: str | Path,
    *,
    run: str = "",
    columns: Iterable[str] | None = None,
    after: tuple[int, int] | None = None,
    problems: list[str] | None = None,
) -> Table:
    """Read the table of a folder, also while it is being written, or a parquet file of somebody's own.

    Args:
        path: A folder that a :class:`TableWriter` writes to, or a run folder that holds one (:data:`FOLDER`), or a file
            ``*.parquet``, whose columns S and L are needed. Where a file of somebody's own lacks them A is 0; step,
            minibatch and seed are 1.
        run: Which start to read, where the folder holds several; the newest by default. Starts that continue each
            other (``first_step``) are one.
        columns: Names; None: all that stand in the files.
        after: Only rows with a later (step, update); closed parts that have none are not read.
        problems: A list that gets what :attr:`Table.problems` gets.

    Returns:
        The rows of all mini-batches that every rank wrote. ``problems`` names a missing rank, a file that is cut short,
        values that are wrong and columns that cannot be read, and mini-batches that some rank lacks, but for the last
        one, which a running training may be writing.

    Raises:
        ValueError: If a file of somebody's own cannot be read or holds something else; the message names file and
            column.
    """
    path, problems = Path(path), [] if problems is None else problems
    names = None if columns is None else [*dict.fromkeys([*NEEDED, *columns])]
    if path.suffix == ".parquet" and not path.is_dir():
        return _read_own(path, names, problems)
    if (path / FOLDER).is_dir():
        path /= FOLDER
    pieces, table = _pieces(path, run, names, after, problems)
    table.problems = problems
    if pieces:
        _complete(path, table, pieces, after)
        _join(table, pieces, names)
    return table


@dataclass
class _Piece:
    """The sound rows of one file: columns as in :class:`Table`, but for text, which is still of Arrow."""

    part: _Part
    meta: dict[str, str]
    columns: dict[str, Any]
    rows: int

    @property
    def ranks(self) -> int:
        text = self.meta.get("ranks", "")
        return int(text) if re.fullmatch(r"\d{1,6}", text) and 0 < int(text) <= _MOST_RANKS else 0

    def keys(self) -> npt.NDArray[np.int64]:
        """One number for each row's step and update."""
        return np.asarray((self.columns["step"] << 31) + self.columns["update"])

    def keep(self, sound_B: npt.NDArray[np.bool_]) -> None:
        if not sound_B.all():
            import pyarrow as pa

            arrow = pa.array(sound_B)
            self.columns = {
                name: values[sound_B] if isinstance(values, np.ndarray) else values.filter(arrow)
                for name, values in self.columns.items()
            }
            self.rows = int(sound_B.sum())


def _pieces(
    folder: Path, run: str, names: list[str] | None, after: tuple[int, int] | None, problems: list[str]
) -> tuple[list[_Piece], Table]:
    """The files of one run; listed again if a part has been closed or merged meanwhile."""
    for attempt in range(_LISTINGS):
        table, wrong = Table(), list[str]()
        try:
            parts = _parts(folder)[0]
            chosen = _choose(folder, parts, run, table, wrong)
            pieces = _read_parts(chosen, names, after, wrong)
            lost = [path for path in folder.iterdir() if _part(path) and _leads_nowhere(path)]
            wrong += [f"{path}: is a link to a file that is not there" for path in lost]
            same = {part.path.name for part in parts} == {part.path.name for part in _parts(folder)[0]}
            if same or attempt == _LISTINGS - 1:
                break
        except FileNotFoundError as error:
            if attempt == _LISTINGS - 1:
                wrong.append(f"{error.filename}: {error.strerror}")
                pieces = []
        except OSError as error:
            pieces = []
            wrong.append(f"{folder}: {error.strerror}")
            break
    problems += wrong
    return pieces, table


def _choose(folder: Path, parts: list[_Part], run: str, table: Table, problems: list[str]) -> list[_Part]:
    """The parts of one run; sets its name, and those of the others."""
    newest: dict[str, int] = {}
    for part in parts:
        newest[part.run] = max(newest.get(part.run, 0), os.stat(part.path).st_mtime_ns)
    runs = sorted(newest, key=lambda name: newest[name])
    if not runs or (run and run not in runs):
        there = f"no file of run {run}; there are {', '.join(runs)}" if runs else _what_it_is(folder)
        problems.append(f"{folder}: {there}")
        return []
    metas = {name: next(filter(None, (_meta(part) for part in parts if part.run == name)), {}) for name in runs}
    begun = [name for name in runs if metas[name]] or runs  # a kill may have left the beginning of a file
    table.run = run or begun[-1]
    if "first_step" in metas[table.run]:  # the folder of one training
        return parts
    table.others = [name for name in runs if name != table.run]
    return [part for part in parts if part.run == table.run]


def _what_it_is(folder: Path) -> str:
    if not folder.is_dir():
        return "is a file, and no .parquet" if folder.exists() else "does not exist"
    below = sorted({path.parent for path in folder.glob("*/*responses-*") if _part(path) is not None})
    rest = f"; there are some in {', '.join(map(str, below[:_NAMED]))}" if below else ""
    return f"holds no file responses-*.parquet{rest}"


def _meta(part: _Part) -> dict[str, str]:
    """Metadata of a part; empty if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(part.path) as file:
            schema = pq.read_schema(file) if part.closed else pa.ipc.open_stream(file).schema
            return _texts(schema)
    except FileNotFoundError:
        raise
    except _unreadable():
        return {}


def _texts(schema: Any) -> dict[str, str]:
    entries = (schema.metadata or {}).items()
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in entries}


def _read_parts(
    parts: list[_Part], names: list[str] | None, after: tuple[int, int] | None, problems: list[str]
) -> list[_Piece]:
    pieces: list[_Piece] = []
    total = 0
    for part in parts:
        if part.closed and after is not None and _steps(part.path)[0] >= 0 and _steps(part.path)[1] < after[0]:
            pieces.append(_Piece(part, _meta(part), {}, 0))  # its rank has written, all the same
            continue
        if (table := _read_part(part, names, after, total, problems)) is None:
            continue
        total += table.num_rows
        piece = _Piece(part, _texts(table.schema), _numpy(part.path, table, problems), table.num_rows)
        if missing := [name for name in NEEDED if name not in piece.columns]:
            problems.append(f"{part.path}: needs the columns {', '.join(missing)}: the file is left out")
            continue
        _check(piece, problems)
        if after is not None:
            piece.keep(piece.keys() > (after[0] << 31) + after[1])
        pieces.append(piece)
    return pieces


def _read_part(
    part: _Part, names: list[str] | None, after: tuple[int, int] | None, total: int, problems: list[str]
) -> Any:
    """The rows of one file as a table of Arrow; None if there are none, or it cannot be read, which is named."""
    import pyarrow.parquet as pq

    try:
        if not part.closed:
            table, problem = _read_stream(part.path, names)
            if problem:
                problems.append(problem)
            return table
        with open_regular(part.path) as file:
            source = pq.ParquetFile(file)
            if total + source.metadata.num_rows > _MOST_ROWS:
                raise ValueError(f"more than {_MOST_ROWS} rows in all")
            groups = [
                number
                for number, (_, high) in enumerate(_step_range_of_groups(source.metadata))
                if after is None or high >= after[0]
            ]
            own = source.schema_arrow.names
            return source.read_row_groups(groups, columns=own if names is None else [x for x in names if x in own])
    except FileNotFoundError:
        raise
    except _unreadable() as error:
        problems.append(f"{part.path}: cannot be read, and is left out ({' '.join(str(error).split())[:200]})")
        return None


def _read_stream(path: Path, names: list[str] | None = None) -> tuple[Any, str]:
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
    except _unreadable():
        pass
    if batches:
        table = pa.Table.from_batches(batches)
    if position == len(content):
        return table, ""
    lost = f"its last {len(content) - position} bytes, after {len(batches)} whole appends, are left out"
    return table, f"{path}: {lost}: an append that a kill has cut, or that is still being written"


def _numpy(path: Path, table: Any, problems: list[str]) -> dict[str, Any]:
    """Columns as :class:`Table` has them, text still of Arrow; one of another kind is named and left out."""
    columns: dict[str, Any] = {}
    for name, values in zip(table.schema.names, table.columns, strict=True):
        try:
            if name in columns:
                raise ValueError("it occurs twice")
            columns[name] = _column(name, values)
        except _unreadable() as error:
            columns.pop(name, None)
            why = " ".join(str(error).split())[:200]
            problems.append(f"{path}: column {name} cannot be read, and is left out ({why})")
    return columns


def _column(name: str, values: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, types = COLUMNS.get(name), pa.types
    if types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if kind == _TEXT or (kind is None and (types.is_string(values.type) or types.is_large_string(values.type))):
        return values.cast(pa.string())
    if types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    number = types.is_integer(values.type) or types.is_floating(values.type)
    if not number:
        raise ValueError(f"must hold {'text' if kind == _TEXT else 'numbers'}, holds {values.type}")
    if types.is_integer(values.type) and kind in (_INT, None):
        return np.asarray(pc.fill_null(values.cast(pa.int64()), -1).to_numpy())
    small = values.type in (pa.float32(), pa.float16()) or kind == _BOOL
    values = values.cast(pa.float32() if small else pa.float64(), safe=False)
    return np.asarray(pc.fill_null(values, math.nan).to_numpy())


#: Of a column: what its values have to be, in words, and whether they are. NaN is null.
_Rule = tuple[str, Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]]


def _whole(low: int, high: int, words: str) -> _Rule:
    return words, lambda values: (values >= low) & (values <= high) & (values == np.floor(values))


def _number(low: float, high: float, words: str) -> _Rule:
    return words, lambda values: np.isnan(values) | ((values >= low) & (values <= high))


_RULES: Final[dict[str, _Rule]] = {
    **{name: _number(-_LARGEST, _LARGEST, "finite number") for name, dtype in COLUMNS.items() if dtype == _FLOAT},
    **{name: _number(0, _LARGEST, "finite number from 0 on") for name in COLUMNS if re.match("weight|Q", name)},
    "weight": _number(0, 1e38, "finite number from 0 on"),  # exp(s_max), which may be 80
    **dict.fromkeys(("inside", "kept", "truncated"), _number(0, 1, "number from 0 to 1")),
    **dict.fromkeys(("step", "update", "minibatch"), _whole(0, 2**31 - 1, "whole number from 0 on")),
    "row": _whole(-1, 2**31 - 1, "whole number"),
    "L": _whole(0, 2**31 - 1, "length"),
}


def _check(piece: _Piece, problems: list[str]) -> None:
    """Leave out the rows with a value that cannot be, and name the column."""
    sound_B = np.ones(piece.rows, bool)
    for name, values in piece.columns.items():
        if name not in _RULES or not isinstance(values, np.ndarray):
            continue
        words, holds = _RULES[name]
        holds_B = holds(values)
        if name == "L":
            holds_B &= (values >= 1) | np.isnan(np.asarray(piece.columns["S"], np.float64))
        if wrong := int((~holds_B).sum()):
            what = f"column {name} has {wrong} values that are no {words}, the first {values[~holds_B][0]:g}"
            problems.append(f"{piece.part.path}: {what} (of {len(values)}): their rows are left out")
            sound_B &= holds_B
    piece.keep(sound_B)
    for name in piece.columns.keys() & COLUMNS.keys():
        if COLUMNS[name] == _INT:
            piece.columns[name] = piece.columns[name].astype(np.int64)


def _complete(folder: Path, table: Table, pieces: list[_Piece], after: tuple[int, int] | None) -> None:
    """Leave out mini-batches that some rank lacks, and name missing ranks; sets metadata, ranks and mini-batches."""
    last_piece = max(pieces, key=lambda piece: (piece.part.run == table.run, piece.part.last))
    table.meta, table.expected = last_piece.meta, last_piece.ranks
    groups: dict[tuple[str, int], dict[int, list[npt.NDArray[np.int64]]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        keys = np.unique(piece.keys()) if piece.rows else np.empty(0, np.int64)
        groups[piece.part.run, piece.ranks][piece.part.rank].append(keys)
    table.ranks = sorted({piece.part.rank for piece in pieces if piece.part.run == table.run})
    if absent := [str(rank) for rank in range(table.expected) if rank not in set(table.ranks)]:
        names = ", ".join(absent[:_NAMED]) + f" and {len(absent) - _NAMED} more" * (len(absent) > _NAMED)
        table.problems.append(f"{folder}: of {table.expected} ranks, {names} wrote nothing")
    everywhere, anywhere = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for by_rank in groups.values():
        of_rank = [np.concatenate(keys) for keys in by_rank.values()]
        everywhere.append(functools.reduce(np.intersect1d, of_rank))
        anywhere += of_rank
    seen, whole = np.unique(np.concatenate(anywhere)), np.unique(np.concatenate(everywhere))
    if not len(seen) and after is None and not table.problems:
        table.problems.append(f"{folder}: no mini-batch of run {table.run} has ended yet; read it again later")
    partial = np.setdiff1d(seen, whole, assume_unique=True)
    if len(lacking := partial[partial < seen.max(initial=0)]):
        places = [f"step {key >> 31}, update {key & (2**31 - 1)}" for key in (lacking[0], lacking[-1])]
        where = places[0] if len(lacking) == 1 else f"{len(lacking)} mini-batches from {places[0]} to {places[1]}"
        table.problems.append(f"{folder}: {where} left out: some rank lacks them")
    if len(seen):
        table.last = int(seen[-1] >> 31), int(seen[-1] & (2**31 - 1))
    table.batches = np.stack([whole >> 31, whole & (2**31 - 1)], axis=1)
    if len(partial):
        for piece in pieces:
            if piece.rows:
                piece.keep(~np.isin(piece.keys(), partial))


def _join(table: Table, pieces: list[_Piece], names: list[str] | None) -> None:
    """Put the rows of all files one after the other, in order, without those that have no S."""
    filled = [piece for piece in pieces if piece.rows]
    for piece in filled:
        missing_B = np.isnan(np.asarray(piece.columns["S"], np.float64))
        table.left_out += int((missing_B & (piece.columns["L"] != 0)).sum())
        piece.keep(~missing_B)
    wanted = [*dict.fromkeys([*NEEDED, *(name for piece in filled for name in piece.columns)])]
    joined = {name: _concatenated(name, filled) for name in (wanted if names is None else names)}
    order = np.lexsort([joined[name] for name in ("row", "update", "step") if name in joined])
    sorted_already = bool((np.diff(order) > 0).all())
    for name, values in joined.items():
        if not isinstance(values, np.ndarray):
            values, table.texts[name] = _codes(values)
        table.columns[name] = values if sorted_already else values[order]


def _concatenated(name: str, pieces: list[_Piece]) -> Any:
    """One column of all files, not known where a file does not have it."""
    import pyarrow as pa

    kinds = {type(piece.columns[name]) for piece in pieces if name in piece.columns}
    text = kinds - {np.ndarray} if kinds else COLUMNS.get(name) == _TEXT
    if text:
        arrays = [
            piece.columns[name].cast(pa.string())
            if isinstance(piece.columns.get(name), pa.ChunkedArray)
            else pa.nulls(piece.rows, pa.string())
            for piece in pieces
        ]
        chunks = [array.chunks if isinstance(array, pa.ChunkedArray) else [array] for array in arrays]
        return pa.chunked_array(itertools.chain(*chunks), pa.string())
    whole = COLUMNS.get(name) == _INT
    filler = np.int64(-1) if whole else np.float32(np.nan)
    values = [np.asarray(piece.columns.get(name, np.full(piece.rows, filler))) for piece in pieces]
    return np.concatenate(values) if values else np.empty(0, filler.dtype)


def _codes(values: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
    """Codes of a column of text, -1 for null, and the text of each."""
    import pyarrow as pa
    import pyarrow.compute as pc

    encoded = values.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks() if encoded.num_chunks != 1 else encoded.chunk(0)
    codes = pc.fill_null(encoded.indices.cast(pa.int32()), -1).to_numpy(zero_copy_only=False)
    return np.asarray(codes), np.asarray(encoded.dictionary.to_numpy(zero_copy_only=False))


def _read_own(path: Path, names: list[str] | None, problems: list[str]) -> Table:
    """A parquet file of somebody's own, or one part of a table, which may have rows without S."""
    import pyarrow.parquet as pq

    try:
        with open_regular(path) as file:
            source = pq.ParquetFile(file)
            rows, own, meta = source.metadata.num_rows, source.schema_arrow.names, _texts(source.schema_arrow)
            few = rows <= _MOST_OWN_ROWS
            wanted = [name for name in own if name in (COLUMNS if names is None else names) or name == "seed"]
            arrow = source.read(columns=wanted) if few else None
    except _unreadable() as error:
        raise ValueError(f"{path}: needs columns of numbers S and L ({' '.join(str(error).split())[:200]})") from error
    if arrow is None:
        raise ValueError(f"{path}: {rows} rows, at most {_MOST_OWN_ROWS} are read: give a part of them")
    wrong: list[str] = []
    piece = _Piece(_Part(path, path.stem, 0, 0, 0, True), meta, _numpy(path, arrow, wrong), rows)
    if wrong or not {"S", "L"} <= piece.columns.keys():
        raise ValueError(f"{path}: needs columns of numbers S and L{''.join(f' ({text})' for text in wrong[:1])}")
    for name, default in (("A", 0.0), ("step", 1), ("minibatch", 1), ("seed", 1)):
        piece.columns.setdefault(name, np.full(rows, default, np.float64 if default == 0 else np.int64))
    piece.columns.setdefault("update", piece.columns["minibatch"])
    minibatch_B = piece.columns["minibatch"]
    if len(negative := minibatch_B[minibatch_B < 0]):
        raise ValueError(f"{path}: minibatch={negative[0]:g}: must be 0 or more; number them from 0")
    if not (minibatch_B > 0).any():
        rest = "0 is left out; leave the column out if pi_old is another policy" if rows else "it is empty"
        raise ValueError(f"{path}: no row with minibatch > 0: {rest}")
    rules = _RULES | {name: _whole(-MAX_WHOLE, MAX_WHOLE, "whole number") for name in ("step", "seed")}
    for name, values in piece.columns.items():
        if isinstance(values, np.ndarray) and name in rules:
            words, holds = rules[name]
            sound_B = holds(values)
            if name in ("S", "L", "A") and "format" not in meta:
                sound_B &= values >= 1 if name == "L" else np.isfinite(values)
            if len(bad := values[~sound_B]):
                what = f"column {name} has {len(bad)} values that are no {words}, the first {bad[0]:g}"
                raise ValueError(f"{path}: {what} (of {rows}): leave out the rows of these responses")
            if COLUMNS.get(name) == _INT or name == "seed":
                piece.columns[name] = values.astype(np.int64)
    table = Table(meta=meta, run=path.stem, ranks=[0], expected=1, problems=problems)
    _join(table, [piece], None if names is None else [*names, "A", "seed"])
    table.batches = np.unique(np.stack([table.columns["step"], table.columns["update"]], axis=1), axis=0)
    return table
