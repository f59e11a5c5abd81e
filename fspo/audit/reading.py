"""The reading side of an audit: the table of responses of a run, of an audit's folder, or of anybody's parquet file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fspo.audit.recording import left_out_words
from fspo.clip import ACCEPT
from fspo.losses import resolve_settings
from fspo.records import GRID_FILE, INFO_FILE, METRICS_FILE, read_info
from fspo.responses import EVERY_MINI_BATCH, Responses
from fspo.table import FOLDER, SCHEMA, Table, columns_of, holds_table, read_table
from fspo.types import SequenceLossSettings

#: rms of S / sqrt(L) before any weight has moved, at most, by precision (docs/results.md#numerical-noise-floor).
_FLOORS: Final = {"fp32": 1e-4, "bf16": 0.1}
#: From here on the engine's log-probabilities explain it, too (docs/which-clip-value.md, which sigma: 0.01 to 0.05).
_ENGINE: Final = 0.01
_FEWEST: Final = 20
#: What an audit reads of a table; identifiers and rewards are as many again.
_COLUMNS: Final = ("minibatch", "L", "A", "inside", "kept", "weight", "truncated", "prompt")


def _first(rms: float) -> str:
    return f"first mini-batch, before any weight moved: rms of S / sqrt(L) is {rms:.2g}, and 0 is expected"


@dataclass
class AuditRecords:
    """What is recorded of one run, over all its ranks.

    Attributes:
        run: Which start of several.
        others: The other starts in the folder.
        loss: Name of the loss.
        responses: All responses; those of mini-batches before which no weight had moved, too.
        left_out: Responses with a log-probability that is not finite: rows without S.
        accept: Share of the responses for which a run has measured its clip values.
        settings: Of the loss, where run.json has them; None if it is not one of this package's.
        problems: What is missing or cannot be read, each with its file.
        own_mask: Whether ``inside``, ``kept`` and ``weight`` are of a mask or a correction, and not of a loss.
    """

    run: str = ""
    others: list[str] = field(default_factory=list)
    loss: str = ""
    responses: Responses = field(default_factory=lambda: Responses.join([]))
    left_out: int = 0
    accept: float = ACCEPT
    settings: SequenceLossSettings | None = None
    problems: list[str] = field(default_factory=list)
    own_mask: bool = False

    def _first_mini_batch(self) -> tuple[str | None, str | None]:
        """An error or a note about pi_old (None: neither), by the mini-batches before any weight had moved."""
        first = self.responses.unmoved()
        if len(first) == 0:
            return None, None
        rms, rms_S = (math.sqrt(float(np.mean(x_B**2))) for x_B in (first.z_B, first.s_B))
        # Rounding has no direction: its mean over many sequences is far below its root mean square.
        leans = len(first) >= _FEWEST and abs(float(first.s_B.mean())) > 0.5 * rms_S
        if len(first) == len(self.responses) and rms > _FLOORS["fp32"] and len(np.unique(first.step_B)) > 1:
            remedy = "if a rollout batch has more, end_mini_batch(step) takes its number, not the optimizer step's"
            rest = "if it has one, the old log-probabilities are not the policy's, or rounded in bf16"
            return None, f"each step has one mini-batch, and rms of S / sqrt(L) is {rms:.2g}, not 0: {remedy}; {rest}"
        if rms > _FLOORS["bf16"] or (leans and rms > _FLOORS["fp32"]):
            what = "old log-probabilities are not the policy's: look for another temperature, top_p or precision, a "
            return f"{_first(rms)}: {what}shifted mask, dropout, or old log-probabilities of the rollout engine", None
        if rms > _FLOORS["fp32"]:
            causes = "expected in bf16; in fp32 the old log-probabilities are another policy's"
            if rms >= _ENGINE:
                causes += "; old log-probabilities of the rollout engine are as far off in bf16"
            return None, f"{_first(rms)}: {causes}"
        return None, None

    def wrong(self) -> str | None:
        """What makes all of S wrong, so that no clip value follows; None if nothing does."""
        return "old log-probabilities are not the policy's (see the note)" if self._first_mini_batch()[0] else None

    def notes(self) -> list[str]:
        """What a reader has to know beside the tables: responses left out, and a first mini-batch that is off."""
        notes = [left_out_words(self.left_out)] if self.left_out else []
        return notes + [note for note in self._first_mini_batch() if note]


def read_audit(path: str | Path, run: str = "", every_mini_batch: bool = False) -> AuditRecords:
    """Read what was recorded of a run.

    Args:
        path: The folder of an audit, the folder of a run of this recipe's trainer, or a parquet file of responses.
        run: Which start to read, where the folder holds several; the newest by default.
        every_mini_batch: See :func:`counts`.

    Returns:
        All mini-batches that every rank wrote. ``problems`` names what is missing (:func:`fspo.table.read_table`).
    """
    path = Path(path)
    problems: list[str] = []
    info = read_info(path, problems) if (path / INFO_FILE).is_file() else {}
    place = path / FOLDER if (path / FOLDER).is_dir() else path
    if path.suffix != ".parquet" and not holds_table(place):
        return AuditRecords(problems=[_what_it_is(path)])
    if path.suffix == ".parquet" and run not in ("", path.stem):
        return AuditRecords(problems=[f"{path}: run={run}: a file is one run; leave run out, or give the folder"])
    if path.suffix == ".parquet":
        try:
            table = _read_own(path, every_mini_batch)
        except ValueError as error:
            return AuditRecords(problems=[str(error)])
    else:
        table = read_table(place, run=run, columns=_COLUMNS)
    problems += table.problems
    if table.last is None and not problems:
        problems.append(f"{path}: no mini-batch has ended yet; read it again later")
    columns = table.columns
    if "prompt" in columns and (columns["prompt"] < 0).any():  # not known of every response
        columns.pop("prompt")
    own = info.get("loss", {}).get("loss_mode", info.get("algo", ""))
    return AuditRecords(
        table.run,
        table.others,
        str(own or table.meta.get("loss", "")),
        Responses.of_rows(columns, counts(table.meta, every_mini_batch)),
        table.left_out,
        accept_of(info),
        settings_of(info),
        problems,
        table.meta.get("rule") == "own",
    )


def counts(meta: Mapping[str, str], every_mini_batch: bool) -> bool:
    """Whether mini-batches before which no weight had moved count: as the table says, else as the reader asks for."""
    return {"yes": True, "no": False}.get(meta.get(EVERY_MINI_BATCH, ""), every_mini_batch)


def _read_own(path: Path, every_mini_batch: bool) -> Table:
    """A parquet file of somebody's own, or one file of a table, which may have rows without S.

    Raises:
        ValueError: If it cannot be read, or a column is missing, is no number or has values that cannot be.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name in (*SCHEMA.names, "seed")]
        rows = file.read(columns=names)
        columns = columns_of(rows)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path}: needs columns of numbers S and L ({' '.join(str(error).split())[:200]})") from error
    if missing := sorted({"S", "L"} - columns.keys()):
        raise ValueError(f"{path}: needs columns of numbers S and L; it lacks {', '.join(missing)}")
    is_ours = b"last" in (file.schema_arrow.metadata or {})
    if is_ours:
        columns = {name: values[np.isfinite(columns["S"])] for name, values in columns.items()}
    for name in ("S", "L", "A", "step", "minibatch", "update", "seed"):
        values_B = columns.get(name, np.zeros(0))
        if name not in ("S", "L") and name not in columns:
            continue
        kind = rows.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise ValueError(f"{path}: column {name} must hold numbers, and holds {kind}")
        low = {"S": -np.inf, "A": -np.inf, "L": 1, "seed": -np.inf}.get(name, 0)
        wrong_B = ~np.isfinite(values_B) | (values_B < low)
        if wrong_B.any():
            what = f"column {name} has {int(wrong_B.sum())} values that cannot be, the first {values_B[wrong_B][0]:g}"
            raise ValueError(f"{path}: {what} (of {len(values_B)}): leave out the rows of these responses")
    if not (is_ours or every_mini_batch) and not (columns.get("minibatch", np.ones(len(columns["S"]))) > 0).any():
        rest = "0 is left out; leave the column out if pi_old is another policy" if len(columns["S"]) else "it is empty"
        raise ValueError(f"{path}: no row with minibatch > 0: {rest}")
    return Table(columns, run=path.stem, ranks=[0], expected=1, last=(0, 0))


def accept_of(info: Mapping[str, Any]) -> float:
    """Share of its responses for which a run has measured its clip values, by run.json; the usual one if it has not."""
    accept = (info.get("clip_values_measured") or [{}])[-1].get("accept", ACCEPT)
    return float(accept) if isinstance(accept, float) and 0 < accept < 1 else ACCEPT


def settings_of(info: Mapping[str, Any]) -> SequenceLossSettings | None:
    """The loss as run.json records it, with the clip values that the run has measured last.

    None if it is not one of this package's, or not recorded, or if a run that was to measure them has set none: it had
    no clip.
    """
    loss, measured = info.get("loss"), (info.get("clip_values_measured") or [{}])[-1]
    asked = info.get("clip_values_asked", info.get("clip_values"))
    if not isinstance(loss, dict) or (asked == "measured" and not measured):
        return None
    try:
        return resolve_settings(loss | {key: measured[key] for key in ("c_low", "c_high") if key in measured})
    except (TypeError, ValueError):
        return None


def of_before(folder: Path) -> str | None:
    """A sentence on records that an older version of this package has left in a folder; None if there are none."""
    old = [folder / "length_stats.jsonl", *sorted(folder.glob("audit-*.jsonl"))]
    first = next((path for path in old if path.is_file()), None)
    if first is None:
        return None
    return (
        f"{first}: sums of an older version, which this one does not read: run it again, or read it with that version"
    )


def _what_it_is(folder: Path) -> str:
    """A sentence: what a folder without a table is, and which path to give instead."""
    if (old := of_before(folder)) is not None:
        return old
    if (folder / GRID_FILE).is_file():
        runs = sorted(path.parent for path in folder.rglob(FOLDER) if holds_table(path))
        return (
            f"{folder} is the folder of a grid: give one of its runs: {', '.join(map(str, runs)) or 'none has begun'}"
        )
    if not folder.is_dir():
        what = "is a file, and no .parquet" if folder.exists() else "does not exist"
    elif any((folder / name).is_file() for name in (INFO_FILE, METRICS_FILE)):
        return f"{folder} is the folder of a run without {FOLDER}: no step of it has ended"
    elif below := sorted(path for path in folder.iterdir() if path.is_dir() and holds_table(path)):
        return f"{folder}: no table of responses; there is one in {', '.join(map(str, below))}"
    else:
        what = "holds no table of responses"
    return f"{folder} {what}: give the folder that FSPO_AUDIT named, or that of a run"
