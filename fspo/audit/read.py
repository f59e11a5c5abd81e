"""The reading side of an audit: the table of responses of a run, of an audit's folder, or of anybody's parquet file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fspo.audit.recording import left_out_words
from fspo.clip import ACCEPT
from fspo.files import INFO_FILE, read_object
from fspo.losses import resolve_settings
from fspo.responses import EVERY_MINI_BATCH, Responses
from fspo.table import FOLDER, SCHEMA, Table, columns_of, holds_table, read_table
from fspo.types import SequenceLossSettings

#: rms of S / sqrt(L) before any weight has moved, at most, by precision (docs/results.md#numerical-noise-floor).
_FLOORS: Final = {"fp32": 1e-4, "bf16": 0.1}
#: From here on the engine's log-probabilities explain it, too (docs/algorithms.md#which-sigma: 0.01 to 0.05).
_ENGINE: Final = 0.01
_FEWEST: Final = 20
#: What an audit reads of a table; identifiers and rewards are as many again.
_COLUMNS: Final = ("minibatch", "row", "L", "A", "inside", "kept", "weight", "truncated", "prompt")
WHAT_IS_READ: Final = (
    "what is read is a table with a row a response: the folder that FSPO_AUDIT or Audit named, a run's folder, or a "
    "parquet file with columns S (log pi - log pi_old, summed over the tokens, in nats) and L (tokens), and A, step, "
    "minibatch, prompt where known. For the share that a log has: python -m fspo.audit expected removed=SHARE "
    "lengths=[L]"
)


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
    responses: Responses = field(default_factory=lambda: Responses.of_rows({}))
    left_out: int = 0
    accept: float = ACCEPT
    settings: SequenceLossSettings | None = None
    problems: list[str] = field(default_factory=list)
    own_mask: bool = False

    def _first_mini_batch(self) -> tuple[str, bool] | None:
        """What is wrong with the mini-batches before any weight had moved, and whether it makes all of S wrong."""
        first = self.responses.unmoved()
        if len(first) == 0:
            return None
        rms, rms_S = (math.sqrt(float(np.mean(x_B**2))) for x_B in (first.z_B, first.s_B))
        # Rounding has no direction: its mean over many sequences is far below its root mean square.
        leans = len(first) >= _FEWEST and abs(float(first.s_B.mean())) > 0.5 * rms_S
        if rms <= _FLOORS["fp32"]:
            return None
        engine = "the rollout engine's are as far off: if they are meant, --every-mini-batch counts all mini-batches"
        says = f"first mini-batch, before any weight moved: rms of S / sqrt(L) is {rms:.2g}, and 0 is expected"
        if len(first) == len(self.responses) and len(np.unique(first.step_B)) > 1:
            steps = "each step has one mini-batch: end_mini_batch(step) takes the number of the rollout batch"
            return f"{says}; {steps}" + f"; {engine}" * (rms >= _ENGINE), False
        if rms > _FLOORS["bf16"] or leans:
            causes = "another temperature, top_p or precision, a shifted mask, dropout"
            return f"{says}: old log-probabilities are not the policy's: {causes}; {engine}", True
        where = "in bf16; in fp32 the old log-probabilities are another policy's"
        return f"{says}, but {where}" + f"; {engine}" * (rms >= _ENGINE), False

    def wrong(self) -> str | None:
        """What makes all of S wrong, so that no clip value follows; None if nothing does."""
        first = self._first_mini_batch()
        return "old log-probabilities are not the policy's (see the note)" if first and first[1] else None

    def notes(self) -> list[str]:
        """What a reader has to know beside the tables: responses left out, and a first mini-batch that is off."""
        first = self._first_mini_batch()
        return [left_out_words(self.left_out)] * bool(self.left_out) + ([first[0]] if first else [])


def read_audit(path: str | Path, run: str = "", every_mini_batch: bool = False) -> AuditRecords:
    """Read what was recorded of a run.

    Args:
        path: The folder of an audit, the folder of a run of this recipe's trainer, or a parquet file of responses.
        run: Which start to read, where the folder holds several; the newest by default.
        every_mini_batch: Whether mini-batches before which no weight had moved count, where the table does not say.

    Returns:
        All mini-batches that every rank wrote. ``problems`` names what is missing (:func:`fspo.table.read_table`).
    """
    path = Path(path)
    problems: list[str] = []
    place = path / FOLDER if (path / FOLDER).is_dir() else path
    info = read_object(path / INFO_FILE, problems) if (path / INFO_FILE).is_file() else {}
    try:
        if path.suffix == ".parquet" and path.is_file():
            table = _read_own(path)
        elif holds_table(place):
            table = read_table(place, run=run, columns=_COLUMNS)
        else:
            raise ValueError(_what_it_is(path))
    except ValueError as error:
        return AuditRecords(problems=[f"{path}: {error}"])
    problems += table.problems
    if table.last is None and not problems:
        problems.append(f"{path}: no mini-batch has ended yet; read it again later")
    columns = table.columns
    if "prompt" in columns and (columns["prompt"] < 0).any():  # not known of every response
        columns.pop("prompt")
    own = info.get("loss", {}).get("loss_mode", info.get("algo", ""))
    every = {"yes": True, "no": False}.get(table.meta.get(EVERY_MINI_BATCH, ""), every_mini_batch)
    return AuditRecords(
        table.run,
        table.others,
        str(own or table.meta.get("loss", "")),
        Responses.of_rows(columns, every),
        table.left_out,
        accept_of(info),
        settings_of(info),
        problems,
        table.meta.get("rule") == "own",
    )


def _read_own(path: Path) -> Table:
    """A parquet file of somebody's own, or one file of a table, which may have rows without S.

    Raises:
        ValueError: If it cannot be read, or a column is missing, holds no numbers, or S or L are not finite.
    """
    try:
        file = pq.ParquetFile(path)
        rows = file.read(columns=[name for name in file.schema_arrow.names if name in (*SCHEMA.names, "seed")])
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"cannot be read ({' '.join(str(error).split())[:200]}): {WHAT_IS_READ}") from error
    if missing := sorted({"S", "L"} - {*rows.schema.names}):
        there = ", ".join(map(repr, file.schema_arrow.names[:20]))
        raise ValueError(f"has columns {there}, and not {' and '.join(missing)}: {WHAT_IS_READ}")
    for name in ("S", "L", "A", "step", "minibatch", "update", "seed"):
        kind = rows.schema.field(name).type if name in rows.schema.names else pa.int64()
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise ValueError(f"column {name} must hold numbers, and holds {kind}")
    columns = columns_of(rows)
    if b"last" in (file.schema_arrow.metadata or {}):  # of a table of ours
        columns = {name: values[np.isfinite(columns["S"])] for name, values in columns.items()}
    for name in ("S", "L", *(name for name in ("step", "minibatch", "update", "seed") if name in columns)):
        wrong_B = ~np.isfinite(columns[name].astype(np.float64)) | (columns[name] < 1 if name == "L" else False)
        if wrong_B.any():
            what = (
                f"column {name} has {int(wrong_B.sum())} values that cannot be, the first {columns[name][wrong_B][0]:g}"
            )
            raise ValueError(f"{what} (of {len(wrong_B)}): leave out the rows of these responses")
    meta = {name.decode(): value.decode() for name, value in (file.schema_arrow.metadata or {}).items()}
    meta = {name: value for name, value in meta.items() if name in (EVERY_MINI_BATCH, "loss", "rule")}
    return Table(columns, run=path.stem, last=(0, 0), meta=meta)


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
    if not isinstance(loss, dict) or (info.get("clip_values") == "measured" and not measured):
        return None
    try:
        return resolve_settings(loss | {key: measured[key] for key in ("c_low", "c_high") if key in measured})
    except (TypeError, ValueError):
        return None


def _what_it_is(path: Path) -> str:
    """A sentence: what a path without a table is, and what to give instead."""
    if path.is_file():
        return f"is no table of responses: {WHAT_IS_READ}"
    if not path.is_dir():
        return f"does not exist: {WHAT_IS_READ}"
    if (path / INFO_FILE).is_file():
        return f"is the folder of a run without {FOLDER}/: no step of it has ended"
    below = sorted(str(one.parent if one.name == FOLDER else one) for one in path.rglob("*") if holds_table(one))
    there = f"give one of {', '.join(below[:20])}; " if below else ""
    return f"holds no table of responses: {there}{WHAT_IS_READ}"
