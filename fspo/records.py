"""The files of a run folder: their names, the fields and readers of their records, and what they record of sequences.

The sums of a mini-batch are one compact JSON object, a line of length_stats.jsonl; sequences.jsonl is what runs with
``fspo.record_sequences=true`` write. A reader that gets a list ``problems`` adds what is wrong, by file and line;
without the list it leaves that out in silence. What may be wrong with a file that comes from elsewhere is bounded by
:mod:`fspo.reading`. Importing this module does not import torch: the launching process
reads run folders too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from fspo.reading import (
    COUNT,
    MAX_NUMBER,
    MAX_WHOLE,
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
    open_regular,
    parse_object,
    read_lines,
    read_text,
    rows_of,
    wrong_fields,
)

if TYPE_CHECKING:
    import torch

    from fspo.positions import PositionSums
    from fspo.sums import SequenceSums

Array = npt.NDArray[np.float64]
T = TypeVar("T")

METRICS_FILE: Final = "metrics.jsonl"
LENGTH_STATS_FILE: Final = "length_stats.jsonl"
FUNNEL_FILE: Final = "funnel.jsonl"
SEQUENCES_FILE: Final = "sequences.jsonl"
#: Files of a run folder that grow with its steps.
STEP_FILES: Final = (METRICS_FILE, LENGTH_STATS_FILE, FUNNEL_FILE, SEQUENCES_FILE)
INFO_FILE: Final = "run.json"
CONFIG_FILE: Final = "config.yaml"
GRID_FILE: Final = "grid.json"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a grid, as grid.json names it; ``path`` is relative to the grid's folder."""

    path: str
    algo: str
    seed: int
    clip_values: str = "published"


_PLANNED: Final = {"path": NAME, "algo": NAME, "seed": WHOLE, "clip_values": NAME}


def planned_runs(folder: Path, problems: list[str]) -> list[PlannedRun]:
    """The runs that a folder's grid.json names; one that is no run is named in ``problems``."""
    path = folder / GRID_FILE
    entries = read_object(path, problems).get("runs")
    if not isinstance(entries, list):
        problems.append(f"{path}: runs must be a list of objects with 'path', 'algo' and 'seed'")
        return []
    runs = []
    for number, entry in enumerate(entries, 1):
        try:
            runs.append(PlannedRun(**check_fields(entry, _PLANNED, needed=("path", "algo", "seed"))))
        except (TypeError, ValueError) as error:
            problems.append(f"{path}: run {number}: {error}")
    return runs


def grid_of(run: Path) -> Path | None:
    """The folder of the grid that has planned a run, by the run's folder; None for a run by itself."""
    for folder in run.parents:
        if (folder / GRID_FILE).is_file():
            paths = [planned.path for planned in planned_runs(folder, [])]
            return folder if str(run.relative_to(folder)) in paths else None
    return None


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


def numbered_lines(path: Path, problems: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line of a JSON Lines file.

    A line that is no JSON object is left out. A kill may have cut one, even in the middle: a resumed run ends it.
    """
    return read_lines(path, [] if problems is None else problems, lambda line: line)


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSON Lines file; none if it is not there. See :func:`numbered_lines`."""
    return [line for _, line in numbered_lines(path)]


def read_steps(path: Path, problems: list[str] | None, read: Callable[[dict[str, Any]], T]) -> list[tuple[int, int, T]]:
    """Line number, step and what ``read`` makes of each line, in the order of writing.

    Steps that the run has left by going back are not among them: a line of a step says that the run stands there; what
    was recorded of later steps is done again, or given up. Lines of one step stay side by side. A line without a step,
    or of which ``read`` makes nothing (:func:`fspo.reading.read_lines`), is named in ``problems`` and left out.
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


def step_lines(path: Path) -> list[dict[str, Any]]:
    """The records of :func:`numbered_steps`."""
    return [line for _, line in numbered_steps(path)]


def to_record(
    sums: SequenceSums, positions: PositionSums | None = None, *, step: int, minibatch: int
) -> dict[str, Any]:
    """The nonzero fine bins of one mini-batch.

    Args:
        sums: Over all micro-batches of the mini-batch, by final length.
        positions: The same by position in the response.
        step: Training step.
        minibatch: Position of the mini-batch in the step, from 0; mini-batch 0 has S = 0.

    Returns:
        ``{"layout", "step", "minibatch", "rows", "hist", "positions"}``. A row is [fine bin, value of each of FIELDS];
        an entry of hist is [fine bin, cell of Z_EDGES, count]; positions are :meth:`fspo.positions.PositionSums.rows`.
        Values have nine significant digits; counts are exact.
    """
    from fspo.sums import LAYOUT_VERSION

    filled = (sums.sums_KF != 0).any(dim=1).nonzero().flatten().tolist()
    return {
        "layout": LAYOUT_VERSION,
        "step": step,
        "minibatch": minibatch,
        "rows": [[k, *(_compact(x) for x in sums.sums_KF[k].tolist())] for k in filled],
        "hist": sums.cells().tolist(),
        "positions": [[_compact(x) for x in row] for row in positions.rows()] if positions is not None else [],
    }


def from_record(record: Mapping[str, Any]) -> SequenceSums:
    """Inverse of :func:`to_record` (up to nine significant digits).

    Raises:
        ValueError: If the record is of another layout or malformed; the message says what is wrong.
    """
    import torch

    from fspo.sums import FIELDS, LAYOUT_VERSION, SequenceSums

    if record.get("layout") != LAYOUT_VERSION:
        raise ValueError(f"layout is {record.get('layout')!r}, this version of fspo reads {LAYOUT_VERSION}")
    sums = SequenceSums.zeros()
    try:
        tables = {"rows": rows_of(1 + len(FIELDS)), "hist": rows_of(3)}
        check_fields(dict(record), tables, needed=tuple(tables))
        rows = torch.tensor(record["rows"], dtype=torch.float64).reshape(-1, 1 + len(FIELDS))
        hist = torch.tensor(record["hist"], dtype=torch.float64).reshape(-1, 3)
        (bins, cells), counts = sums.hist_KH.shape, rows[:, 1 : 1 + FIELDS.index("length")]
        never_negative = [
            1 + k for k, name in enumerate(FIELDS) if name.startswith("length") or name.endswith("squared")
        ]
        for what, holds in {
            "a fine bin": _is_index(rows[:, 0], bins) & (rows[:, never_negative] >= 0).all(dim=1),
            "a count": (counts >= 0) & (counts <= counts[:, :1]) & (counts <= MAX_WHOLE),
            "a cell": _is_index(hist[:, 0], bins) & _is_index(hist[:, 1], cells) & _is_index(hist[:, 2], MAX_WHOLE),
        }.items():
            if not bool(holds.all()):
                raise ValueError(f"{what} is out of range")
        sums.sums_KF[rows[:, 0].long()] = rows[:, 1:]
        sums.hist_KH[hist[:, 0].long(), hist[:, 1].long()] = hist[:, 2].long()
    except (TypeError, ValueError) as error:
        raise ValueError(f"malformed record of length statistics: {error}") from error
    return sums


def _is_index(values: torch.Tensor, below: int) -> torch.Tensor:
    return (values >= 0) & (values < below) & (values % 1 == 0)


def _compact(value: float) -> float | int:
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(f"{value:.9g}")


@dataclass(frozen=True, slots=True)
class MiniBatches:
    """The recorded sequences of one run, without the first mini-batch of each step: S (nats), L and A of each."""

    step: list[int]
    s: list[Array]
    length: list[Array]
    advantage: list[Array]

    def pooled(self) -> tuple[Array, Array]:
        """S and L of all sequences."""
        return np.concatenate(self.s), np.concatenate(self.length)


_COLUMNS: Final = {
    **dict.fromkeys(("S", "A", "weight", "reward"), NUMBER),
    **dict.fromkeys(("row", "accepted"), COUNT),
    "L": Kind("a number from 1 on", lambda value: NUMBER.holds(value) and value >= 1),
    **{"uid": TEXT, "truncated": SWITCH, "data_source": NAME},
}
_SEQUENCES: Final = {"minibatch": COUNT, **{name: list_of(kind) for name, kind in _COLUMNS.items()}}


def _sequences(line: dict[str, Any]) -> dict[str, Any]:
    needed = ("uid", "reward", "truncated", "data_source", "accepted") if "uid" in line else ()
    check_fields(line, _SEQUENCES, needed=("minibatch", *needed))
    if len(lengths := {len(line[name]) for name in _COLUMNS if name in line}) > 1:
        raise ValueError(f"the columns have different lengths: {sorted(lengths)}")
    return line


def sequence_lines(run: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """The lines of a run's ``sequences.jsonl`` in the order of step and mini-batch; empty if it recorded none.

    Of a mini-batch that was done again, the last line counts; steps that the run has left by going back do not.
    """
    path = run / SEQUENCES_FILE
    kept = read_steps(path, problems, _sequences) if path.exists() else []
    lines = {(step, line["minibatch"]): line for _, step, line in kept}
    return [lines[key] for key in sorted(lines)]


def read_sequences(run: Path) -> MiniBatches | None:
    """S, L and A of :func:`sequence_lines`; None if the run recorded none."""
    lines = [line for line in sequence_lines(run) if line["minibatch"] > 0 and {"S", "L", "A"} <= line.keys()]
    if not lines:
        return None
    columns = ([np.asarray(line[name], dtype=np.float64) for line in lines] for name in ("S", "L", "A"))
    return MiniBatches([line["step"] for line in lines], *columns)


#: The responses of a year of 8B training; more would take longer to read than anybody waits.
_MOST_ROWS: Final = 10_000_000


def read_parquet(path: Path) -> dict[str, Array]:
    """The responses of a parquet file, a row each: S (nats), L and A, all finite, step, mini-batch and seed.

    A is 0, step, mini-batch and seed are 1 where the file lacks them; ``prompt``, the number of the prompt group, is
    there where the file has it. The responses of mini-batch 0 are those before which no weight had moved.

    Raises:
        ValueError: If the file cannot be read, a column is missing or holds something else, or no mini-batch is above
            0; the message names file and column.
    """
    try:
        import pandas as pd
        import pyarrow as pa  # what pandas reads with
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ValueError(f"{path}: a parquet file needs pandas and pyarrow: pip install '.[report]'") from error
    try:
        with open_regular(path):
            rows = pq.read_metadata(path).num_rows
        table = pd.read_parquet(path) if rows <= _MOST_ROWS else pd.DataFrame({"S": [], "L": []})
        columns = {name: table[name].to_numpy(np.float64) for name in ("S", "L")}
        columns["A"] = table["A"].to_numpy(np.float64) if "A" in table else np.zeros(len(table))
        for name in ("step", "minibatch", "seed"):
            columns[name] = table.get(name, pd.Series(np.ones(len(table)))).to_numpy(np.float64)
        if "prompt" in table:
            columns["prompt"] = np.unique(table["prompt"].to_numpy(), return_inverse=True)[1].astype(np.float64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError, pa.ArrowException) as error:
        raise ValueError(f"{path}: needs columns of numbers S and L ({error!r})") from error
    if rows > _MOST_ROWS:
        raise ValueError(f"{path}: {rows} rows, at most {_MOST_ROWS} are read: give a part of them")
    if negative := sorted(columns["minibatch"][columns["minibatch"] < 0]):
        raise ValueError(f"{path}: minibatch={negative[0]:g}: must be 0 or more; number them from 0")
    if not (columns["minibatch"] > 0).any():
        rest = "0 is left out; leave the column out if pi_old is another policy" if len(table) else "it is empty"
        raise ValueError(f"{path}: no row with minibatch > 0: {rest}")
    for name, values in columns.items():
        sound = np.abs(values) <= MAX_NUMBER
        if name in ("step", "minibatch", "seed"):
            sound = (np.abs(values) <= MAX_WHOLE) & (values % 1 == 0)
        elif name == "L":
            sound = (values >= 1) & (values <= MAX_WHOLE)
        if len(wrong := values[~sound]):
            kind = (
                "length"
                if name == "L"
                else "whole number"
                if name in ("step", "minibatch", "seed")
                else "finite number"
            )
            what = f"column {name} has {len(wrong)} values that are no {kind}, the first {wrong[0]:g}"
            raise ValueError(f"{path}: {what} (of {len(values)}): leave out the rows of these responses")
    return columns
