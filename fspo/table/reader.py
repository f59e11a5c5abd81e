"""Reads the table of responses, also while it is being written; what is wrong with a file is named, and left out."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.reading import MAX_WHOLE, open_regular
from fspo.table.parts import (
    BOOL,
    COLUMNS,
    FLOAT,
    FOLDER,
    INT,
    MOST_RANKS,
    NEEDED,
    TEXT,
    TWICE,
    Part,
    leads_nowhere,
    part_of,
    parts_of,
    read_stream,
    step_ranges,
    steps_of,
    unreadable,
)

_MOST_ROWS: Final = 100_000_000
#: Of somebody's own file: the responses of a year of 8B training.
_MOST_OWN_ROWS: Final = 10_000_000
_NAMED: Final = 10
#: Of a number: its square, summed over any run, is still a float, and it is one in single precision.
_LARGEST: Final = 1e30
_LISTINGS: Final = 10


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
        left_out: Responses without S, which are in none of the columns, but for those that a run skips for A = 0.
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
    return folder.is_dir() and any(map(part_of, folder.iterdir()))


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

    part: Part
    meta: dict[str, str]
    columns: dict[str, Any]
    rows: int

    @property
    def ranks(self) -> int:
        text = self.meta.get("ranks", "")
        return int(text) if re.fullmatch(r"\d{1,6}", text) and 0 < int(text) <= MOST_RANKS else 0

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
            parts = parts_of(folder)[0]
            chosen = _choose(folder, parts, run, table, wrong)
            pieces = _read_parts(chosen, names, after, wrong)
            lost = [path for path in folder.iterdir() if part_of(path) and leads_nowhere(path)]
            wrong += [f"{path}: is a link to a file that is not there" for path in lost]
            same = {part.path.name for part in parts} == {part.path.name for part in parts_of(folder)[0]}
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


def _choose(folder: Path, parts: list[Part], run: str, table: Table, problems: list[str]) -> list[Part]:
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
    below = sorted({path.parent for path in folder.glob("*/*responses-*") if part_of(path) is not None})
    rest = f"; there are some in {', '.join(map(str, below[:_NAMED]))}" if below else ""
    return f"holds no file responses-*.parquet{rest}"


def _meta(part: Part) -> dict[str, str]:
    """Metadata of a part; empty if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(part.path) as file:
            schema = pq.read_schema(file) if part.closed else pa.ipc.open_stream(file).schema
            return _texts(schema)
    except FileNotFoundError:
        raise
    except unreadable():
        return {}


def _texts(schema: Any) -> dict[str, str]:
    entries = (schema.metadata or {}).items()
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in entries}


def _read_parts(
    parts: list[Part], names: list[str] | None, after: tuple[int, int] | None, problems: list[str]
) -> list[_Piece]:
    pieces: list[_Piece] = []
    total = 0
    for part in parts:
        if part.closed and after is not None and steps_of(part.path)[0] >= 0 and steps_of(part.path)[1] < after[0]:
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
    part: Part, names: list[str] | None, after: tuple[int, int] | None, total: int, problems: list[str]
) -> Any:
    """The rows of one file as a table of Arrow; None if there are none, or it cannot be read, which is named."""
    import pyarrow.parquet as pq

    try:
        if not part.closed:
            table, problem = read_stream(part.path, names)
            if problem:
                problems.append(problem)
            return table
        with open_regular(part.path) as file:
            source = pq.ParquetFile(file)
            if total + source.metadata.num_rows > _MOST_ROWS:
                raise ValueError(f"more than {_MOST_ROWS} rows in all")
            groups = [
                number
                for number, (_, high) in enumerate(step_ranges(source.metadata))
                if after is None or high >= after[0]
            ]
            own = source.schema_arrow.names
            return source.read_row_groups(groups, columns=own if names is None else [x for x in names if x in own])
    except FileNotFoundError:
        raise
    except unreadable() as error:
        problems.append(f"{part.path}: cannot be read, and is left out ({' '.join(str(error).split())[:200]})")
        return None


def _numpy(path: Path, table: Any, problems: list[str]) -> dict[str, Any]:
    """Columns as :class:`Table` has them, text still of Arrow; one of another kind is named and left out."""
    columns: dict[str, Any] = {}
    for name, values in zip(table.schema.names, table.columns, strict=True):
        try:
            if name in columns:
                raise ValueError("it occurs twice")
            columns[name] = _column(name, values)
        except unreadable() as error:
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
    if kind == TEXT or (kind is None and (types.is_string(values.type) or types.is_large_string(values.type))):
        return values.cast(pa.string())
    if types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    number = types.is_integer(values.type) or types.is_floating(values.type)
    if not number:
        raise ValueError(f"must hold {'text' if kind == TEXT else 'numbers'}, holds {values.type}")
    if types.is_integer(values.type) and kind in (INT, None):
        return np.asarray(pc.fill_null(values.cast(pa.int64()), -1).to_numpy())
    small = values.type in (pa.float32(), pa.float16()) or kind == BOOL
    values = values.cast(pa.float32() if small else pa.float64(), safe=False)
    return np.asarray(pc.fill_null(values, math.nan).to_numpy())


#: Of a column: what its values have to be, in words, and whether they are. NaN is null.
_Rule = tuple[str, Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]]


def _whole(low: int, high: int, words: str) -> _Rule:
    return words, lambda values: (values >= low) & (values <= high) & (values == np.floor(values))


def _number(low: float, high: float, words: str) -> _Rule:
    return words, lambda values: np.isnan(values) | ((values >= low) & (values <= high))


_RULES: Final[dict[str, _Rule]] = {
    **{name: _number(-_LARGEST, _LARGEST, "finite number") for name, dtype in COLUMNS.items() if dtype == FLOAT},
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
        if COLUMNS[name] == INT:
            piece.columns[name] = piece.columns[name].astype(np.int64)


def _complete(folder: Path, table: Table, pieces: list[_Piece], after: tuple[int, int] | None) -> None:
    """Leave out mini-batches that some rank lacks, and name missing ranks; sets metadata, ranks and mini-batches."""
    if twice := [piece for piece in pieces if TWICE in piece.meta]:
        remedy = "count rollout batches through all epochs, and give each start a run= of its own"
        what = f"{twice[0].meta[TWICE]}: what was recorded from it on is replaced"
        table.problems.append(f"{twice[0].part.path}: a mini-batch came twice, {what}; {remedy}")
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
        left_out_B = missing_B & (piece.columns["L"] != 0)
        if piece.meta.get("without_S") == "A = 0" and "A" in piece.columns:  # they were not computed
            left_out_B &= piece.columns["A"] != 0
        table.left_out += int(left_out_B.sum())
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
    text = kinds - {np.ndarray} if kinds else COLUMNS.get(name) == TEXT
    if text:
        arrays = [
            piece.columns[name].cast(pa.string())
            if isinstance(piece.columns.get(name), pa.ChunkedArray)
            else pa.nulls(piece.rows, pa.string())
            for piece in pieces
        ]
        chunks = [array.chunks if isinstance(array, pa.ChunkedArray) else [array] for array in arrays]
        return pa.chunked_array(itertools.chain(*chunks), pa.string())
    whole = COLUMNS.get(name) == INT
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
    except unreadable() as error:
        raise ValueError(f"{path}: needs columns of numbers S and L ({' '.join(str(error).split())[:200]})") from error
    if arrow is None:
        raise ValueError(f"{path}: {rows} rows, at most {_MOST_OWN_ROWS} are read: give a part of them")
    wrong: list[str] = []
    piece = _Piece(Part(path, path.stem, 0, 0, 0, True), meta, _numpy(path, arrow, wrong), rows)
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
            if COLUMNS.get(name) == INT or name == "seed":
                piece.columns[name] = values.astype(np.int64)
    table = Table(meta=meta, run=path.stem, ranks=[0], expected=1, problems=problems)
    _join(table, [piece], None if names is None else [*names, "A", "seed"])
    table.batches = np.unique(np.stack([table.columns["step"], table.columns["update"]], axis=1), axis=0)
    return table
