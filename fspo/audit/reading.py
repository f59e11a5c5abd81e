"""The reading side of an audit: the files of all ranks, those of a running training, or a parquet file."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fspo.audit.recording import PREFIX, SUFFIX, left_out_words
from fspo.conclusion import Responses
from fspo.losses import judged
from fspo.positions import by_position
from fspo.reading import COUNT, NAME, SWITCH, Kind, check_fields, open_regular, parse_object, read_lines
from fspo.records import (
    GRID_FILE,
    INFO_FILE,
    LENGTH_STATS_FILE,
    METRICS_FILE,
    from_record,
    read_info,
    read_parquet,
    read_steps,
)
from fspo.sums import SequenceSums
from fspo.types import SequenceLossSettings

#: rms of S / sqrt(L) before any weight has moved, at most, by the precision of the model (docs/tables/noise-floor.csv).
_FLOORS: Final = {"fp32": 1e-4, "bf16": 0.1}
_FEWEST: Final = 20
_MOST_RANKS: Final = 100_000
_NAMED: Final = 10


def _first(rms: float) -> str:
    return f"first mini-batch, before any weight moved: rms of S / sqrt(L) is {rms:.2g}, and 0 is expected"


@dataclass
class AuditRecords:
    """What an audit's folder holds of one run, joined over its ranks.

    Attributes:
        run: Which start of several.
        others: The other starts in the folder.
        loss: Name of the loss.
        acceptance: Whether the rule of acceptance was known; otherwise only S, L and A mean something.
        truncation: Whether it was known which responses were cut at the maximum length.
        sums: By (step, mini-batch); mini-batch 0 came before any weight had moved.
        positions: The same by octave of position over all lengths, [P, 6]; see :func:`fspo.positions.by_position`.
        left_out: Responses with a log-probability that is not finite, which are in none of the sums.
        problems: What is missing or cannot be read, each with its file.
    """

    run: str = ""
    others: list[str] = field(default_factory=list)
    loss: str = ""
    acceptance: bool = True
    truncation: bool = False
    sums: dict[tuple[int, int], SequenceSums] = field(default_factory=dict)
    positions: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    left_out: int = 0
    problems: list[str] = field(default_factory=list)

    def moved(self) -> list[SequenceSums]:
        """The sums of all mini-batches but those with the number 0, in order."""
        return [self.sums[key] for key in sorted(self.sums) if key[1] > 0]

    def _first_mini_batch(self) -> tuple[str | None, str | None]:
        """What is wrong with pi_old by the mini-batches before any weight had moved, and what is only to be noted."""
        first = sum((self.sums[key] for key in sorted(self.sums) if key[1] == 0), SequenceSums.zeros())
        if (count := first.total("count")) == 0:
            return None, None
        rms, rms_S = (math.sqrt(first.total(name) / count) for name in ("z_squared", "S_squared"))
        # Rounding has no direction: its mean over many sequences is far below its root mean square.
        leans = count >= _FEWEST and abs(first.total("S")) / count > 0.5 * rms_S
        if rms > _FLOORS["bf16"] or (leans and rms > _FLOORS["fp32"]):
            what = "old log-probabilities are not the policy's: look for another temperature, top_p or precision, a "
            return f"{_first(rms)}: {what}shifted mask, dropout, or old log-probabilities of the rollout engine", None
        if rms > _FLOORS["fp32"]:
            return None, f"{_first(rms)}: rounding in bf16 explains it, in fp32 nothing does but another old policy"
        return None, None

    def wrong(self) -> str | None:
        """What makes all of S wrong, so that no clip value follows; None if nothing does."""
        return "old log-probabilities are not the policy's (see the note)" if self._first_mini_batch()[0] else None

    def notes(self) -> list[str]:
        """What a reader has to know beside the tables: responses left out, and a first mini-batch that is off."""
        notes = [left_out_words(self.left_out)] if self.left_out else []
        return notes + [note for note in self._first_mini_batch() if note]


def read_audit(folder: str | Path, run: str = "") -> AuditRecords:
    """Read the files of an audit.

    Args:
        folder: What :class:`Audit` was given, or the folder of a run of this recipe's trainer.
        run: Which start to read, where the folder holds several; the newest by default.

    Returns:
        The records of all mini-batches that every rank wrote. ``problems`` names a missing rank, a cut line, and
        mini-batches that some rank lacks, but for the last one, which a running training may be writing.
    """
    records, folder = AuditRecords(), Path(folder)
    by_run: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
        by_run[path.name.removeprefix(PREFIX).rpartition("-")[0]].append(path)
    if not by_run and (folder / LENGTH_STATS_FILE).is_file():
        return _read_run(folder, run)
    if not by_run or (run and run not in by_run):
        unknown = f"{folder}: no file {PREFIX}*{SUFFIX} of run {run}; there are {', '.join(by_run)}"
        records.problems.append(unknown if by_run else _what_it_is(folder))
        return records
    records.run = run or list(by_run)[-1]
    records.others = [name for name in by_run if name != records.run]
    ranks: set[int] = set()
    keys: list[set[tuple[int, int]]] = []
    expected = 0
    for path in by_run[records.run]:
        keys.append(set())
        for _, content in read_lines(path, records.problems, _of_audit):
            if isinstance(content, dict):
                records.loss, records.acceptance = content["loss"], content["acceptance"]
                records.truncation = content.get("truncation", False)
                expected = content["ranks"]
                ranks.add(content["rank"])
                continue
            key, sums, positions_PF, left_out = content
            keys[-1].add(key)
            records.left_out += left_out
            records.sums[key] = records.sums.get(key, SequenceSums.zeros()) + sums
            records.positions[key] = records.positions.get(key, 0.0) + positions_PF
    if absent := [str(rank) for rank in range(expected) if rank not in ranks]:
        names = ", ".join(absent[:_NAMED]) + f" and {len(absent) - _NAMED} more" * (len(absent) > _NAMED)
        records.problems.append(f"{folder}: of {expected} ranks, {names} wrote nothing")
    if not records.sums and not records.problems:
        records.problems.append(f"{folder}: no mini-batch of run {records.run} has ended yet; read it again later")
    everywhere, last = set.intersection(*keys), max(records.sums, default=None)
    for key in sorted(records.sums.keys() - everywhere):
        del records.sums[key], records.positions[key]
        if key != last:
            records.problems.append(f"{folder}: step {key[0]}, mini-batch {key[1]} is left out: some rank lacks it")
    return records


def _read_run(folder: Path, run: str) -> AuditRecords:
    """The sums of a run of this recipe's trainer, by the last time that each step was done."""
    records = AuditRecords(folder.resolve().name, truncation=True)
    if run and run != records.run:
        records.problems.append(f"--run {run}: {folder} is the folder of one run: leave the option out")
    info, path = read_info(folder, records.problems), folder / LENGTH_STATS_FILE
    records.loss = str(info.get("loss", {}).get("loss_mode", info.get("algo", "")))
    for _, _, (key, sums, positions_PF, _) in read_steps(path, records.problems, _of_mini_batch):
        records.sums[key], records.positions[key] = sums, positions_PF
    return records


_HEAD: Final = {
    "loss": NAME,
    "acceptance": SWITCH,
    "truncation": SWITCH,
    "rank": COUNT,
    "ranks": Kind(f"a whole number up to {_MOST_RANKS}", lambda value: COUNT.holds(value) and value <= _MOST_RANKS),
}
_NEEDED: Final = ("loss", "acceptance", "rank", "ranks")
_LINE: Final = {"step": COUNT, "minibatch": COUNT, "left_out": COUNT}
_Part = tuple[tuple[int, int], SequenceSums, torch.Tensor, int]


def _of_audit(line: dict[str, Any]) -> dict[str, Any] | _Part:
    """The head of a file, or :func:`_of_mini_batch`.

    Raises:
        ValueError and the like: If the line is neither.
    """
    return check_fields(line, _HEAD, needed=_NEEDED) if "audit" in line else _of_mini_batch(line)


def _of_mini_batch(line: dict[str, Any]) -> _Part:
    """Of a mini-batch its step and number, sums, positions, and the responses left out."""
    check_fields(line, _LINE, needed=("step", "minibatch"))
    try:
        sums, positions_PF = from_record(line), by_position(line.get("positions", []))
    except ValueError as error:
        if re.search("NaN|Infinity", json.dumps(line.get("rows"))):
            raise ValueError("sums that are not finite: audit again, this version leaves such responses out") from error
        raise
    return (line["step"], line["minibatch"]), sums, positions_PF, line.get("left_out", 0)


def _what_it_is(folder: Path) -> str:
    """What a folder is that holds no file of an audit, and what to give instead."""
    if (folder / GRID_FILE).is_file():
        runs = sorted(path.parent for path in folder.rglob(LENGTH_STATS_FILE))
        return (
            f"{folder} is the folder of a grid: give one of its runs: {', '.join(map(str, runs)) or 'none has begun'}"
        )
    if not folder.is_dir():
        what = "is a file, and no .parquet" if folder.exists() else "does not exist"
    elif any((folder / name).is_file() for name in (INFO_FILE, METRICS_FILE)):
        return f"{folder} is the folder of a run without {LENGTH_STATS_FILE}: no step of it has ended"
    elif below := sorted({path.parent for path in folder.glob(f"*/{PREFIX}*{SUFFIX}")}):
        return f"{folder}: no file {PREFIX}*{SUFFIX}; there are some in {', '.join(map(str, below))}"
    else:
        what = f"holds no file {PREFIX}*{SUFFIX}"
    return f"{folder} {what}: give the folder that FSPO_AUDIT named"


class GrowingAudit:
    """What the files of a running training have gained since they were last read. Defined here.

    Args:
        folder: Of the audit.
        run: Which start.

    Attributes:
        acceptance: Whether the rule of acceptance is known.
        ranks, expected: Ranks whose files are there, and how many there should be.
    """

    def __init__(self, folder: str | Path, run: str) -> None:
        self._folder, self._run = Path(folder), run
        self._read: dict[Path, int] = {}
        self.acceptance, self.ranks, self.expected = True, 0, 0

    def new(self) -> SequenceSums:
        """The sums of the whole lines that were not there before, without mini-batches that readers leave out.

        Raises:
            ValueError, KeyError: If a line is none of an audit.
        """
        whole = SequenceSums.zeros()
        for path in self._folder.glob(f"{PREFIX}{self._run}-*{SUFFIX}"):
            with open_regular(path) as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(text)
            for line in text.decode("utf-8", errors="replace").splitlines():
                content = _of_audit(parse_object(f"{line}\n"))
                if isinstance(content, dict):
                    self.ranks, self.expected = self.ranks + 1, content["ranks"]
                    self.acceptance = self.acceptance and content["acceptance"]
                elif content[0][1] > 0:
                    whole = whole + content[1]
        return whole


def read_responses(path: Path, rule: SequenceLossSettings | None = None) -> tuple[AuditRecords, Responses]:
    """A parquet file of responses (:func:`fspo.records.read_parquet`) as an audit.

    Mini-batches are counted from 0 in the order of seed, step and mini-batch; each seed has its own.

    Args:
        path: The file.
        rule: The loss whose band judges the responses; None: no rule is known.

    Raises:
        ValueError: If the file is not as it has to be; the message names it.
    """
    table = read_parquet(path)
    moved = {name: column[table["minibatch"] > 0] for name, column in table.items()}
    numbers = np.stack([moved[name] for name in ("seed", "step", "minibatch")])
    batch_B = np.unique(numbers, axis=1, return_inverse=True)[1].reshape(-1)
    s, length, a = (torch.from_numpy(moved[name]) for name in ("S", "L", "A"))
    first = {name: torch.from_numpy(column[table["minibatch"] == 0]) for name, column in table.items()}
    sums = {}
    if len(first["S"]):
        sums[0, 0] = SequenceSums.zeros().add_(judged(first["S"], first["L"].long(), first["A"], rule))
    for batch in range(int(batch_B.max()) + 1):
        index = torch.from_numpy(np.flatnonzero(batch_B == batch))
        sums[batch, 1] = SequenceSums.zeros().add_(judged(s[index], length[index].long(), a[index], rule))
    responses = Responses.of_rows(moved["S"], moved["L"], batch_B, moved.get("prompt"))
    return AuditRecords(acceptance=rule is not None, sums=sums), responses
