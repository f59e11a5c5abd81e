"""The length audit: exact sums by length of every mini-batch of a run, for any sequence loss in anyone's trainer.

Each rank that sees sequences of its own writes one file of JSON lines, so no collective is needed::

    audit = Audit("audit", ALGORITHMS["seq_gspo"])
    audit.add(log_prob, old_log_prob, mask, advantages)   # every micro-batch of the update
    audit.end_mini_batch(step)                             # after the optimizer step

``python -m fspo.audit FOLDER`` prints what they add up to. The first line of a file says whose it is; every other line
is one mini-batch in the form of :func:`fspo.records.to_record`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fspo.acceptance import acceptance_counts, judged_rows, stack_sums, without_rule
from fspo.conclusion import ACCEPT, Responses, conclude
from fspo.fairness.lre import Array, equal_mass_starts, is_informative, merge_bins, plain_lre
from fspo.files import piped
from fspo.losses import ALGORITHMS, check_shapes, judged
from fspo.markdown import markdown_table
from fspo.positions import PositionSums, by_position
from fspo.records import (
    GRID_FILE,
    INFO_FILE,
    METRICS_FILE,
    from_record,
    numbered_lines,
    read_parquet,
    to_record,
)
from fspo.sums import SequenceSums

if TYPE_CHECKING:
    from fspo.types import SequenceLossOutput, SequenceLossSettings

#: Files of an audit: the run's identifier and the rank's number stand between these.
PREFIX, SUFFIX = "audit-", ".jsonl"
_BINS: Final = 8
#: Columns of the sums that :class:`LengthBins` merges.
_COLUMNS: Final = ("count", "accepted", "clipped_high", "clipped_low", "length", "S", "S_squared")


class MiniBatchSums(NamedTuple):
    """One mini-batch of a rank: its number (:func:`minibatch_numbers`), its sums by final length and by position."""

    number: int
    sums: SequenceSums
    positions: PositionSums


def minibatch_numbers(moves: Sequence[bool], on_policy: bool = True) -> list[int]:
    """Numbers of the mini-batches of a rollout batch in every record: 0 where readers leave a mini-batch out.

    Where pi_old is the policy at the start of the step, S is 0, but for rounding, until the first weight has moved.

    Args:
        moves: Of each mini-batch in order, whether its optimizer step moves the weights (not with learning rate 0).
        on_policy: Whether pi_old is the policy at the start of the step; otherwise none is left out.
    """
    if not on_policy:
        return list(range(1, len(moves) + 1))
    return [index if any(moves[:index]) else 0 for index in range(len(moves))]


class Audit:
    """Sums of one rank, mini-batch by mini-batch, in memory and in a file. Defined here.

    Args:
        folder: Where the file goes, made if it is not there; None keeps nothing on disk.
        rule: The loss, if its rule of acceptance is one of this package's. Without it, and without ``output`` in
            :meth:`add`, only S, L and A are summed.
        loss: Name of the loss, for readers.
        rank, ranks: Which of how many ranks that see different sequences this is.
        run: The same on all ranks of a start, another one for each start.
        on_policy: Whether pi_old is the policy at the start of each step; see :func:`minibatch_numbers`.

    Raises:
        ValueError: If the band of ``rule`` is measured during training, which nothing here does.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        rule: SequenceLossSettings | None = None,
        *,
        loss: str = "",
        rank: int = 0,
        ranks: int = 1,
        run: str = "",
        on_policy: bool = True,
    ) -> None:
        if rule is not None and rule.needs_state:
            raise ValueError(
                f"rule={rule!r}: its band is measured during training, and an audit measures none; give a rule "
                "that stands still, such as fspo, or none, and add(..., output=) what your loss makes of its own state"
            )
        run = run or uuid.uuid4().hex[:12]
        self._file = None if folder is None else Path(folder) / f"{PREFIX}{run}-{rank:05d}{SUFFIX}"
        self._whose = {"run": run, "rank": rank, "ranks": ranks}
        self.loss = loss
        self._rule, self._on_policy = rule, on_policy
        self.knows_acceptance = rule is not None
        self._step = -1
        self._moves: list[bool] = []
        self._left_out: torch.Tensor | int = 0
        self._warned = False
        #: Micro-batches of the mini-batch in progress, and their sums.
        self.micro_batches, self.sums, self.positions = 0, SequenceSums.zeros(), PositionSums.zeros()

    @property
    def writes(self) -> bool:
        """Whether the sums go to a file."""
        return self._file is not None

    def begin_step(self, step: int) -> None:
        """Count the mini-batches of this rollout batch from now on, unless they are already being counted."""
        if step != self._step:
            self._step, self._moves = step, []

    @property
    def index(self) -> int:
        """Mini-batches of the rollout batch that have ended: the index of the one in progress."""
        return len(self._moves)

    def add(
        self,
        log_prob_BT: torch.Tensor,
        old_log_prob_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        advantages_BT: torch.Tensor,
        output: SequenceLossOutput | None = None,
        truncated_B: torch.Tensor | None = None,
    ) -> None:
        """Add one micro-batch to the mini-batch in progress.

        A response with a log-probability that is not finite is left out, and counted.

        Args:
            log_prob_BT, old_log_prob_BT: log pi and log pi_old of the response tokens, nats; packed ones come in by
                :func:`from_packed`.
            mask_BT: Nonzero on the response tokens; a row without any is padding.
            advantages_BT: A, the same for all tokens of a sequence; or [B] or [B, 1], one value per sequence.
            output: What the loss accepts and removes, if it says so itself.
            truncated_B: True where the response was cut at the maximum length.

        Raises:
            ValueError: If shapes differ.
        """
        with torch.no_grad():
            if log_prob_BT.dim() == 2 and advantages_BT.shape in ((len(log_prob_BT),), (len(log_prob_BT), 1)):
                advantages_BT = advantages_BT.view(-1, 1).expand(log_prob_BT.shape)
            check_shapes(log_prob_BT, old_log_prob_BT, advantages_BT, mask_BT, None)
            self.micro_batches += 1
            self.knows_acceptance |= output is not None
            tensors = (log_prob_BT.detach(), old_log_prob_BT, advantages_BT, mask_BT)
            if output is None:
                output = without_rule(*tensors) if self._rule is None else judged_rows(*tensors, self._rule)
            mask_BT = mask_BT.to(torch.bool)
            usable_B = torch.isfinite(output.log_ratio_B) & (output.valid_B | ~mask_BT.any(dim=-1))
            self._left_out = (~usable_B).sum() + self._left_out
            output = dataclasses.replace(output, valid_B=output.valid_B & usable_B)
            mask_BT = mask_BT & usable_B[:, None]
            self.sums.add_(output, truncated_B)
            self.positions.add_(log_prob_BT.detach().double() - old_log_prob_BT, mask_BT)

    def clear(self) -> None:
        """Forget the mini-batch in progress; the next one begins."""
        self.micro_batches, self._left_out = 0, 0
        self.sums, self.positions = SequenceSums.zeros(), PositionSums.zeros()

    def end_mini_batch(self, step: int, moves: bool = True) -> MiniBatchSums:
        """Write the mini-batch in progress, if there is a folder, and begin the next one.

        Args:
            step: Of the rollout batch that it belongs to.
            moves: Whether its optimizer step moves the weights (not where the learning rate is 0).

        Returns:
            Its number, which is 0 if readers leave it out, and its sums.
        """
        self.begin_step(step)
        self._moves.append(moves)
        number, left_out = minibatch_numbers(self._moves, self._on_policy)[-1], int(self._left_out)
        sums, positions = self.sums, self.positions
        self.clear()
        if left_out and not self._warned:
            self._warned = True
            print(f"fspo.audit: step {step}: {_left_out(left_out)}", file=sys.stderr, flush=True)
        if self._file is not None:
            lines = [to_record(sums, positions, step=step, minibatch=number) | {"left_out": left_out}]
            if not self._file.exists():
                self._file.parent.mkdir(parents=True, exist_ok=True)
                lines.insert(0, {"audit": 1, "loss": self.loss, "acceptance": self.knows_acceptance} | self._whose)
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        return MiniBatchSums(number, sums, positions)


def from_packed(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Values of packed sequences, [T] or [1, T], as [B, longest], with 0 behind the end of each.

    Of ``torch.ones_like(values)``, or of the mask of the response tokens, it gives the mask.

    Args:
        values: One for each token of all sequences, one after the other.
        cu_seqlens: Where each sequence begins, and the end of the last, [B + 1], as attention kernels take it.

    Raises:
        ValueError: If the two do not belong together.
    """
    ends, values_T = cu_seqlens.to(values.device, torch.int64), values.reshape(-1)
    length_B = ends.diff()
    if ends.dim() != 1 or len(ends) == 0 or ends[0] != 0 or ends[-1] != len(values_T) or bool((length_B < 0).any()):
        raise ValueError(
            f"cu_seqlens={ends.flatten()[:5].tolist()}... of {ends.numel()}: must rise from 0 to the number of values, "
            f"{len(values_T)}; cut padding at the end of the pack off both"
        )
    inside_BT = torch.arange(int(length_B.max()) if len(length_B) else 0, device=values.device) < length_B[:, None]
    return values_T.new_zeros(inside_BT.shape).masked_scatter(inside_BT, values_T)


def _left_out(count: int) -> str:
    return f"{count} response{'s' * (count != 1)} with a log-probability that is not finite left out"


#: rms of S / sqrt(L) before any weight has moved, at most, by the precision of the model (docs/tables/noise-floor.csv).
_FLOORS: Final = {"fp32": 1e-4, "bf16": 0.1}
_FEWEST: Final = 20


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
        sums: By (step, mini-batch); mini-batch 0 came before any weight had moved.
        positions: The same by octave of position over all lengths, [P, 6]; see :func:`fspo.positions.by_position`.
        left_out: Responses with a log-probability that is not finite, which are in none of the sums.
        problems: What is missing or cannot be read, each with its file.
    """

    run: str = ""
    others: list[str] = field(default_factory=list)
    loss: str = ""
    acceptance: bool = True
    sums: dict[tuple[int, int], SequenceSums] = field(default_factory=dict)
    positions: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    left_out: int = 0
    problems: list[str] = field(default_factory=list)

    def moved(self) -> list[SequenceSums]:
        """The sums of all mini-batches but those with the number 0, in order."""
        return [self.sums[key] for key in sorted(self.sums) if key[1] > 0]

    def notes(self) -> list[str]:
        """What a reader has to know beside the tables: responses left out, and a first mini-batch that is off."""
        notes = [_left_out(self.left_out)] if self.left_out else []
        first = sum((self.sums[key] for key in sorted(self.sums) if key[1] == 0), SequenceSums.zeros())
        if (count := first.total("count")) == 0:
            return notes
        rms, rms_S = (math.sqrt(first.total(name) / count) for name in ("z_squared", "S_squared"))
        # Rounding has no direction: its mean over many sequences is far below its root mean square.
        leans = count >= _FEWEST and abs(first.total("S")) / count > 0.5 * rms_S
        if rms > _FLOORS["bf16"] or (leans and rms > _FLOORS["fp32"]):
            what = "old log-probabilities are not the policy's: look for another temperature, top_p or precision, a "
            notes.append(f"{_first(rms)}: {what}shifted mask, dropout, or old log-probabilities of the rollout engine")
        elif rms > _FLOORS["fp32"]:
            notes.append(f"{_first(rms)}: rounding in bf16 explains it, in fp32 nothing does but another old policy")
        return notes


def read_audit(folder: str | Path, run: str = "") -> AuditRecords:
    """Read the files of an audit.

    Args:
        folder: What :class:`Audit` was given.
        run: Which start to read, where the folder holds several; the newest by default.

    Returns:
        The records of all mini-batches that every rank wrote. ``problems`` names a missing rank, a cut line, and
        mini-batches that some rank lacks, but for the last one, which a running training may be writing.
    """
    records, folder = AuditRecords(), Path(folder)
    by_run: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
        by_run[path.name.removeprefix(PREFIX).rpartition("-")[0]].append(path)
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
        for number, line in numbered_lines(path, records.problems):
            try:
                if "audit" in line:
                    records.loss, records.acceptance = str(line["loss"]), bool(line["acceptance"])
                    expected = int(line["ranks"])
                    ranks.add(int(line["rank"]))
                    continue
                key = (int(line["step"]), int(line["minibatch"]))
                sums, positions_PF = from_record(line), by_position(line["positions"])
                if not bool(sums.sums_KF.isfinite().all()):
                    raise ValueError("sums that are not finite: audit again, this version leaves such responses out")
                left_out = int(line.get("left_out", 0))
            except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
                records.problems.append(f"{path}:{number}: not a line of an audit ({error})")
                continue
            keys[-1].add(key)
            records.left_out += left_out
            records.sums[key] = records.sums.get(key, SequenceSums.zeros()) + sums
            records.positions[key] = records.positions.get(key, 0.0) + positions_PF
    if absent := [str(rank) for rank in range(expected) if rank not in ranks]:
        records.problems.append(f"{folder}: of {expected} ranks, {', '.join(absent)} wrote nothing")
    if not records.sums and not records.problems:
        records.problems.append(f"{folder}: no mini-batch of run {records.run} has ended yet; read it again later")
    everywhere, last = set.intersection(*keys), max(records.sums, default=None)
    for key in sorted(records.sums.keys() - everywhere):
        del records.sums[key], records.positions[key]
        if key != last:
            records.problems.append(f"{folder}: step {key[0]}, mini-batch {key[1]} is left out: some rank lacks it")
    return records


def _what_it_is(folder: Path) -> str:
    """What a folder is that holds no file of an audit, and what to give instead."""
    if not folder.is_dir():
        what = "is a file, and no .parquet" if folder.exists() else "does not exist"
    elif any((folder / name).is_file() for name in (INFO_FILE, METRICS_FILE, GRID_FILE)):
        return f"{folder} is the folder of a run or a grid: python -m fspo.report {folder} --out DIR reads it"
    elif below := sorted({path.parent for path in folder.glob(f"*/{PREFIX}*{SUFFIX}")}):
        return f"{folder}: no file {PREFIX}*{SUFFIX}; there are some in {', '.join(map(str, below))}"
    else:
        what = f"holds no file {PREFIX}*{SUFFIX}"
    return f"{folder} {what}: give the folder that FSPO_AUDIT named"


@dataclass(frozen=True)
class LengthBins:
    """Eight length bins of equal mass: the columns of the sums by bin, [J] each, and what follows from them."""

    starts: npt.NDArray[np.int64]
    columns: dict[str, Array]

    @classmethod
    def of(cls, sums: SequenceSums) -> LengthBins:
        """From sums by fine length bin."""
        starts = equal_mass_starts(sums.column("count").numpy(), _BINS)
        return cls(starts, {name: merge_bins(sums.column(name).numpy(), starts) for name in _COLUMNS})

    def mean(self, name: str) -> Array:
        """Mean of a column over the sequences of each bin, [J]."""
        return np.asarray(self.columns[name] / self.columns["count"])

    def spread(self) -> Array:
        """Standard deviation of S in each bin, [J]."""
        return np.asarray(np.sqrt(np.maximum(self.mean("S_squared") - self.mean("S") ** 2, 0.0)))


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
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(text)
            for line in map(json.loads, text.splitlines()):
                if "audit" in line:
                    self.ranks, self.expected = self.ranks + 1, int(line["ranks"])
                    self.acceptance = self.acceptance and bool(line["acceptance"])
                elif line["minibatch"] > 0:
                    whole = whole + from_record(line)
        return whole


def live_metrics(sums: SequenceSums, acceptance: bool = True) -> dict[str, float]:
    """A handful of numbers of one step, from its sums by fine length bin. Defined here.

    Args:
        sums: Of all its mini-batches.
        acceptance: Whether the rule of acceptance is known.

    Returns:
        ``accept_rate``, ``removed`` (share of sequences whose gradient the clip removes), both absent if every S is 0,
        and ``lre`` (over eight bins of equal mass; absent if none was accepted or none clipped); mean length and
        standard deviation of S in the shortest and in the longest of these bins. Empty before any weight has moved.
    """
    count = sums.total("count")
    if count == 0:
        return {}
    bins = LengthBins.of(sums)
    length_J, spread_J = bins.mean("length"), bins.spread()
    metrics = {"length_short": length_J[0], "length_long": length_J[-1]}
    metrics |= {"S_std_short": spread_J[0], "S_std_long": spread_J[-1]}
    if acceptance and sums.total("S_squared") > 0:  # else nothing could be clipped
        metrics["accept_rate"] = sums.total("accepted") / count
        metrics["removed"] = (sums.total("clipped_high") + sums.total("clipped_low")) / count
        if is_informative(metrics["accept_rate"]):
            metrics["lre"] = plain_lre(bins.columns["accepted"], bins.columns["count"])[0]
    return {name: float(value) for name, value in metrics.items()}


def _position_columns(sums_PF: Array) -> dict[str, list[str]]:
    """Of S_t, the sum over the first t tokens, of all responses that reach t = 1, 2, 4, ...."""
    octave_P = np.flatnonzero(sums_PF[:, 0] > 1)
    n, s, squares, tokens, _, token_squares = sums_PF[octave_P].T
    t_P, spread_P = 2**octave_P, np.sqrt(np.maximum(squares / n - (s / n) ** 2, 0.0))
    columns = {"t": [str(t) for t in t_P], "reach t": [f"{x:.0f}" for x in n]}
    named = {"std of S_t": spread_P, "std / sqrt(t)": spread_P / np.sqrt(t_P)}
    named["rms of one token, t to 2t - 1"] = np.sqrt(token_squares / tokens)
    return columns | {head: [f"{x:.4f}" for x in values] for head, values in named.items()}


NOT_MOVED: Final = (
    "no mini-batch in which a weight had moved before: the audit needs two optimizer steps per rollout batch"
)


def describe(records: AuditRecords, accept: float = ACCEPT, responses: Responses | None = None) -> str:
    """Tables by length and by position of all mini-batches in which the policy had moved, and what follows from them.

    Args:
        records: Of :func:`read_audit` or :func:`read_responses`.
        accept: Share of the responses for whose acceptance clip values are wanted.
        responses: Those behind the records, where they are known one by one.
    """
    parts, notes = records.moved(), [f"note: {note}" for note in records.notes()]
    if not parts:
        return "\n".join([*notes, NOT_MOVED])
    if not sum(part.total("count") for part in parts):
        return "\n".join(
            [*notes, f"loss {records.loss or 'not named'}: no response with a token in {len(parts)} mini-batches"]
        )
    bins = LengthBins.of(sum(parts, SequenceSums.zeros()))
    length_J, spread_J = bins.mean("length"), bins.spread()
    columns = {
        "mean length": [f"{x:.0f}" for x in length_J],
        "sequences": [f"{x:.0f}" for x in bins.columns["count"]],
        "mean S": [f"{x:+.4f}" for x in bins.mean("S")],
        "std of S": [f"{x:.4f}" for x in spread_J],
        "std / sqrt(L)": [f"{x:.4f}" for x in spread_J / np.sqrt(length_J)],
    }
    name, sequences = records.loss or "not named", bins.columns["count"].sum()
    lines = [f"loss {name}: {len(parts)} mini-batches, {sequences:.0f} sequences"]
    if records.acceptance:
        shares = {"accepted": "accepted", "removed, A > 0": "clipped_high", "removed, A < 0": "clipped_low"}
        columns |= {head: [f"{x:.1%}" for x in bins.mean(column)] for head, column in shares.items()}
        error = acceptance_counts(stack_sums(parts)).error(bins.starts)
        lre = error.debiased
        lines.append(
            f"accepted {error.rate:.1%}; LRE {lre.value:.3f} [{lre.low:.3f}, {lre.high:.3f}] (0: acceptance does not "
            f"depend on length; noise floor {error.noise_floor:.3f})"
            if error.is_informative
            else f"nothing was {'clipped' if error.rate else 'accepted'}, so there is no LRE"
        )
    positions = [x for key, x in records.positions.items() if key[1] > 0]
    second = [_position_columns(torch.stack(positions).sum(0).numpy())] if positions else []
    columns_of_tables = [columns, *second]
    tables = [markdown_table(list(table), list(zip(*table.values(), strict=True))) for table in columns_of_tables]
    follows = conclude(Responses.of_sums(parts) if responses is None else responses, records.loss, accept)
    end = "\n".join(["What follows:", *(f"- {line}" for line in follows)])
    return "\n\n".join(["\n".join(lines + notes), *tables, end])


def read_responses(path: Path) -> tuple[AuditRecords, Responses]:
    """A parquet file of responses (:func:`fspo.records.read_parquet`) as an audit of a loss without a rule.

    Raises:
        ValueError: If the file is not as it has to be; the message names it.
    """
    table = read_parquet(path)
    moved = {name: column[table["minibatch"] > 0] for name, column in table.items()}
    numbers = np.stack([moved[name] for name in ("seed", "step", "minibatch")])
    batch_B = np.unique(numbers, axis=1, return_inverse=True)[1].reshape(-1)
    s, length, a = (torch.from_numpy(moved[name]) for name in ("S", "L", "A"))
    sums = {}
    for batch in range(int(batch_B.max()) + 1):
        index = torch.from_numpy(np.flatnonzero(batch_B == batch))
        output = judged(s[index], length[index].long(), a[index], ALGORITHMS["fspo"])
        sums[batch, 1] = SequenceSums.zeros().add_(output)
    responses = Responses.of_rows(moved["S"], moved["L"], batch_B, moved.get("prompt"))
    return AuditRecords(acceptance=False, sums=sums), responses


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m fspo.audit FOLDER``; status 1 if something is missing, 2 if there is no audit to read."""
    parser = argparse.ArgumentParser(prog="python -m fspo.audit", description="Tables by length, and what follows.")
    parser.add_argument("folder", type=Path, help="what FSPO_AUDIT named, or a parquet file with columns S and L")
    parser.add_argument("--run", default="", help="one of several starts in the folder; the newest by default")
    parser.add_argument(
        "--accept", type=float, default=ACCEPT, help="share that is to lie inside (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    if not 0 < chosen.accept < 1:
        parser.error(f"--accept {chosen.accept:g}: must lie between 0 and 1, such as 0.85")
    if chosen.folder.suffix == ".parquet":
        try:
            table, responses = read_responses(chosen.folder)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(describe(table, chosen.accept, responses))
        return 0
    records = read_audit(chosen.folder, chosen.run)
    if records.others:
        print(f"note: run {records.run}; --run reads another one: {', '.join(records.others)}", file=sys.stderr)
    for problem in records.problems:
        print(f"{'warning' if records.run else 'error'}: {problem}", file=sys.stderr)
    if records.sums:
        print(describe(records, chosen.accept))
    if not records.run:
        return 2
    return 1 if records.problems else 0


if __name__ == "__main__":
    sys.exit(piped(main))
