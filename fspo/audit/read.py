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
from fspo.clip_value import ACCEPT, FEWEST_GROUPS
from fspo.files import INFO_FILE, read_object
from fspo.losses import resolve_settings
from fspo.responses import EVERY_MINI_BATCH, Responses
from fspo.table import FOLDER, Table, columns_of, holds_table, read_table
from fspo.types import SequenceLossSettings

#: rms of S / sqrt(L) before any weight has moved, at most, by precision (docs/results.md#numerical-noise-floor).
_FLOORS: Final = {"fp32": 1e-4, "bf16": 0.1}
#: From here on the engine's log-probabilities explain it, too (docs/algorithms.md#which-sigma: 0.01 to 0.05).
_ENGINE: Final = 0.01
#: What an audit reads of a table; identifiers and rewards are as many again.
_PLACES: Final = ("step", "update", "minibatch", "row")
_COLUMNS: Final = (*_PLACES, "S", "L", "A", "inside", "kept", "weight", "truncated", "prompt")
#: What each value of a column must be in a file of somebody's own.
_RULES: Final = {
    **{"S": "a finite number", "L": "a number of at least 1"},
    **dict.fromkeys(("step", "update", "minibatch", "seed"), "a whole number"),
}
_WHAT_IS_READ: Final = (
    "what is read is a table with a row a response: the folder that FSPO_AUDIT or Audit named, the folder of a run, "
    "once a step has ended, or a parquet file with columns S (log pi - log pi_old, summed over the tokens, in nats), "
    "L (tokens), and A, step, minibatch, prompt where known. For the share that a log has: "
    "python -m fspo.audit expected removed=SHARE lengths=[L]"
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
        rms, rms_S = (math.sqrt(float(np.mean(x_B**2))) if len(first) else 0.0 for x_B in (first.z_B, first.s_B))
        if rms <= _FLOORS["fp32"]:
            return None
        # Rounding has no direction: its mean over many sequences is far below its root mean square.
        leans = len(first) >= FEWEST_GROUPS and abs(float(first.s_B.mean())) > 0.5 * rms_S
        is_wrong, why = False, "as is usual in bf16; in fp32 the old log-probabilities are another policy's"
        if len(first) == len(self.responses) and len(np.unique(first.step_B)) > 1:
            why = "but each step has one mini-batch: end_mini_batch(step) takes the number of the rollout batch"
        elif rms > _FLOORS["bf16"] or leans:
            causes = "another temperature, top_p or precision, a shifted mask, dropout"
            is_wrong, why = True, f"so the old log-probabilities are not the policy's: {causes}"
        if is_wrong or rms >= _ENGINE:
            why += "; if the rollout engine's are meant, which are as far off, --every-mini-batch counts all"
        says = f"first mini-batch, before any weight moved: rms of S / sqrt(L) is {rms:.2g}, and 0 is expected, {why}"
        return says, is_wrong

    def wrong(self) -> bool:
        """Whether the old log-probabilities are not the policy's, so that all of S is wrong."""
        return (self._first_mini_batch() or ("", False))[1]

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
            table = _read_file(path)
        elif holds_table(place):
            table = read_table(place, run=run, columns=_COLUMNS)
        else:
            what = "holds no table of responses" if path.exists() else "does not exist"
            raise ValueError(f"{what}: {_WHAT_IS_READ}")
    except ValueError as error:
        return AuditRecords(problems=[f"{path}: {error}"])
    columns = table.columns
    if not (len(table) or table.left_out or table.problems):
        problems.append(f"{path}: holds no response")
    if "prompt" in columns and (columns["prompt"] < 0).any():  # not known of every response
        columns.pop("prompt")
    loss, accept, settings = "", ACCEPT, None
    try:
        loss, accept, settings = _of_run(info)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problems.append(f"{path / INFO_FILE}: what it says of the loss cannot be read ({error})")
    every = {"yes": True, "no": False}.get(table.meta.get(EVERY_MINI_BATCH, ""), every_mini_batch)
    return AuditRecords(
        table.run,
        table.others,
        loss or table.meta.get("loss", ""),
        Responses.of_rows(columns, every),
        table.left_out,
        accept,
        settings,
        problems + table.problems,
        table.meta.get("rule") == "own",
    )


def _read_file(path: Path) -> Table:
    """A parquet file of somebody's own, or one file of a table; ValueError where a column is wrong."""
    try:
        names = pq.read_schema(path).names
        rows = pq.read_table(path, columns=[name for name in (*_COLUMNS, "seed") if name in names])
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot be read ({' '.join(str(error).split())[:200]}): {_WHAT_IS_READ}") from error
    if missing := sorted({"S", "L"} - {*names}):
        there = ", ".join(map(repr, names[:20]))
        raise ValueError(f"has columns {there}, and not {' and '.join(missing)}: {_WHAT_IS_READ}")
    meta = {key.decode(): value.decode() for key, value in (rows.schema.metadata or {}).items()}
    table = Table(meta=meta, run=path.stem, last=(0, 0))
    if "last" in meta:  # of a table, which may have rows without S
        table.take(rows)
        return table
    for name in rows.column_names:
        try:
            if name == "prompt":
                table.columns |= columns_of(rows.select([name]))
                continue
            # A copy: torch takes none of arrow's memory.
            values_B = table.columns[name] = rows[name].cast(pa.float64()).to_numpy().copy()
        except pa.ArrowException as error:
            kinds = "numbers or text" if name == "prompt" else "numbers"
            raise ValueError(f"column {name} must hold {kinds}, and holds {rows[name].type} ({error})") from None
        wrong_B = ~np.isfinite(values_B)
        if name == "L":
            wrong_B |= values_B < 1
        elif name != "S":
            wrong_B |= values_B != np.floor(values_B)
        if name in _RULES and wrong_B.any():
            holds = f"holds {values_B[wrong_B][0]:g}, which is not {_RULES[name]}"
            raise ValueError(f"column {name} {holds}: leave out the rows of these responses")
    return table


def _of_run(info: Mapping[str, Any]) -> tuple[str, float, SequenceLossSettings | None]:
    """What run.json says of the loss: its name, the share of its clip values, and its settings as measured last.

    These are None if it is not one of this package's, or if a run that was to measure clip values has none yet: it had
    no clip.
    """
    loss, measured = info.get("loss", {}), (info.get("clip_values_measured") or [{}])[-1]
    name, accept = str(loss.get("loss_mode") or info.get("algo") or ""), float(measured.get("accept", ACCEPT))
    if info.get("clip_values") == "measured" and not measured:
        return name, accept, None
    return name, accept, resolve_settings(loss | {key: measured[key] for key in ("c_low", "c_high") if measured})
