"""The files of a run folder: their names, one reader of their lines, and what they record of sequences.

The sums of a mini-batch are one compact JSON object, a line of length_stats.jsonl; sequences.jsonl is what runs with
``fspo.record_sequences=true`` write. A reader that gets a list ``problems`` adds what is wrong, by file and line;
without the list it leaves that out in silence. Importing this module does not import torch: the launching process
reads run folders too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fspo.positions import PositionSums
    from fspo.sums import SequenceSums

Array = npt.NDArray[np.float64]

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


def grid_of(run: Path) -> Path | None:
    """The folder of the grid that has planned a run, by the run's folder; None for a run by itself."""
    for folder in run.parents:
        if (folder / GRID_FILE).is_file():
            planned = read_object(folder / GRID_FILE).get("runs")
            paths = [entry.get("path") for entry in planned or () if isinstance(entry, dict)]
            return folder if str(run.relative_to(folder)) in paths else None
    return None


def _object(text: str, where: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError as error:  # also an integer of thousands of digits
        cut = "; the last line is cut short" if text and not text.endswith("\n") else ""
        problems.append(f"{where}: not JSON ({getattr(error, 'msg', error)}){cut}")
        return None
    if not isinstance(value, dict):
        problems.append(f"{where}: must hold a JSON object, holds {type(value).__name__}")
        return None
    return value


def read_object(path: Path, problems: list[str] | None = None) -> dict[str, Any]:
    """The JSON object that a file holds; empty if the file is missing, cannot be read or holds something else."""
    problems = [] if problems is None else problems
    try:
        return _object(path.read_text(encoding="utf-8", errors="replace"), str(path), problems) or {}
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
    return {}


def numbered_lines(path: Path, problems: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line of a JSON Lines file.

    A line that is no JSON object is left out. A kill may have cut one, even in the middle: a resumed run ends it.

    Raises:
        OSError: without ``problems``, if the file is there and cannot be read.
    """
    reported = [] if problems is None else problems
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, start=1):
                if text.strip() and (value := _object(text, f"{path}:{number}", reported)) is not None:
                    yield number, value
    except OSError as error:
        if problems is None and not isinstance(error, FileNotFoundError):
            raise
        reported.append(f"{path}: {error.strerror}")


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSON Lines file; none if it is not there. See :func:`numbered_lines`."""
    return [line for _, line in numbered_lines(path)]


def numbered_steps(path: Path, problems: list[str] | None = None) -> list[tuple[int, dict[str, Any]]]:
    """Line number and record by step, in the order of writing, without steps that the run has left by going back.

    A line of a step says that the run stands there; what was recorded of later steps is done again, or given up. Lines
    of one step stay side by side. A line without an integer ``step`` is named in ``problems`` and left out.
    """
    kept: list[tuple[int, dict[str, Any]]] = []
    for number, line in numbered_lines(path, problems):
        if not isinstance(step := line.get("step"), int):
            if problems is not None:
                problems.append(f"{path}:{number}: needs an integer 'step'")
            continue
        while kept and kept[-1][1]["step"] > step:
            kept.pop()
        kept.append((number, line))
    return kept


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
        rows = torch.tensor(record["rows"], dtype=torch.float64).reshape(-1, 1 + len(FIELDS))
        hist = torch.tensor(record["hist"], dtype=torch.int64).reshape(-1, 3)
        sums.sums_KF[rows[:, 0].long()] = rows[:, 1:]
        sums.hist_KH[hist[:, 0], hist[:, 1]] = hist[:, 2]
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ValueError(f"malformed record of length statistics: {error}") from error
    return sums


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


def sequence_lines(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``sequences.jsonl`` in the order of step and mini-batch; empty if it recorded none.

    Of a mini-batch that was done again, the last line counts; steps that the run has left by going back do not.
    """
    lines = {(line["step"], line["minibatch"]): line for line in step_lines(run / SEQUENCES_FILE)}
    return [lines[key] for key in sorted(lines)]


def read_sequences(run: Path) -> MiniBatches | None:
    """S, L and A of :func:`sequence_lines`; None if the run recorded none."""
    lines = [line for line in sequence_lines(run) if line["minibatch"] > 0]
    if not lines:
        return None
    columns = ([np.asarray(line[name], dtype=np.float64) for line in lines] for name in ("S", "L", "A"))
    return MiniBatches([line["step"] for line in lines], *columns)


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
        import pyarrow  # noqa: F401  (what pandas reads with)
    except ImportError as error:
        raise ValueError(f"{path}: a parquet file needs pandas and pyarrow: pip install '.[report]'") from error
    try:
        table = pd.read_parquet(path)
        columns = {name: table[name].to_numpy(np.float64) for name in ("S", "L")}
        columns["A"] = table["A"].to_numpy(np.float64) if "A" in table else np.zeros(len(table))
        for name in ("step", "minibatch", "seed"):
            columns[name] = table.get(name, pd.Series(np.ones(len(table)))).to_numpy(np.float64)
        if "prompt" in table:
            columns["prompt"] = np.unique(table["prompt"].to_numpy(), return_inverse=True)[1].astype(np.float64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: needs columns of numbers S and L ({error!r})") from error
    if negative := sorted(columns["minibatch"][columns["minibatch"] < 0]):
        raise ValueError(f"{path}: minibatch={negative[0]:g}: must be 0 or more; number them from 0")
    if not (columns["minibatch"] > 0).any():
        rest = "0 is left out; leave the column out if pi_old is another policy" if len(table) else "it is empty"
        raise ValueError(f"{path}: no row with minibatch > 0: {rest}")
    for name in ("S", "L", "A"):
        values = columns[name]
        if len(wrong := values[~np.isfinite(values) | ((values < 1) & (name == "L"))]):
            what = f"column {name} has {len(wrong)} values that are no length or not finite, the first {wrong[0]:g}"
            raise ValueError(f"{path}: {what} (of {len(values)}): leave out the rows of these responses")
    return columns
