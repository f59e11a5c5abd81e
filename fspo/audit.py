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
import json
import sys
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from fspo.acceptance import acceptance_counts, stack_sums, without_rule
from fspo.fairness import Array, equal_mass_starts, merge_bins, plain_lre
from fspo.losses import sequence_policy_loss
from fspo.markdown import markdown_table
from fspo.positions import PositionSums
from fspo.records import from_record, numbered_lines, positions_from_record, to_record
from fspo.sums import SequenceSums

if TYPE_CHECKING:
    from fspo.types import SequenceLossOutput, SequenceLossSettings

#: Files of an audit: the run's identifier and the rank's number stand between these.
PREFIX, SUFFIX = "audit-", ".jsonl"
_BINS: Final = 8
#: Columns of the sums from which :func:`live_metrics` are made.
LIVE_COLUMNS: Final = ("count", "accepted", "clipped_high", "clipped_low", "length", "S", "S_squared")


def numbers(moves: Sequence[bool], on_policy: bool = True) -> list[int]:
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
        on_policy: Whether pi_old is the policy at the start of each step; see :func:`numbers`.
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
        run = run or uuid.uuid4().hex[:12]
        self._file = None if folder is None else Path(folder) / f"{PREFIX}{run}-{rank:05d}{SUFFIX}"
        self._whose = {"run": run, "rank": rank, "ranks": ranks}
        self.loss, self.ranks = loss, ranks
        self._rule, self._on_policy = rule, on_policy
        self.knows_acceptance = rule is not None
        self._step = -1
        self._moves: list[bool] = []
        self.sums, self.positions = SequenceSums.zeros(), PositionSums.zeros()

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

        Args:
            log_prob_BT, old_log_prob_BT: log pi and log pi_old of the response tokens, nats.
            mask_BT: Nonzero on the response tokens; a row without any is padding.
            advantages_BT: A, the same for all tokens of a sequence; or [B], one value per sequence.
            output: What the loss accepts and removes, if it says so itself.
            truncated_B: True where the response was cut at the maximum length.
        """
        with torch.no_grad():
            if advantages_BT.dim() == 1:
                advantages_BT = advantages_BT[:, None].expand(mask_BT.shape)
            tensors = (log_prob_BT.detach(), old_log_prob_BT, advantages_BT, mask_BT)
            self.knows_acceptance |= output is not None
            if output is None:
                output = without_rule(*tensors) if self._rule is None else sequence_policy_loss(*tensors, self._rule)
            self.sums.add_(output, truncated_B)
            self.positions.add_(log_prob_BT - old_log_prob_BT, mask_BT)

    @property
    def mini_batches(self) -> int:
        """Mini-batches of the present step so far."""
        return len(self._moves)

    def take(self) -> tuple[SequenceSums, PositionSums]:
        """The sums of the mini-batch in progress, by final length and by position; the next one begins."""
        taken = self.sums, self.positions
        self.sums, self.positions = SequenceSums.zeros(), PositionSums.zeros()
        return taken

    def end_mini_batch(self, step: int, moves: bool = True) -> SequenceSums:
        """Write the mini-batch in progress, and begin the next one.

        Args:
            step: Of the rollout batch that it belongs to.
            moves: Whether its optimizer step moves the weights (not where the learning rate is 0).

        Returns:
            Its sums; all 0 if readers leave it out.
        """
        if step != self._step:
            self._step, self._moves = step, []
        self._moves.append(moves)
        number = numbers(self._moves, self._on_policy)[-1]
        sums, positions = self.take()
        if self._file is not None:
            lines = [to_record(sums, positions, step=step, minibatch=number)]
            if not self._file.exists():
                self._file.parent.mkdir(parents=True, exist_ok=True)
                lines.insert(0, {"audit": 1, "loss": self.loss, "acceptance": self.knows_acceptance} | self._whose)
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        return sums if number else SequenceSums.zeros()


@dataclass
class AuditRecords:
    """What an audit's folder holds, joined over its ranks.

    Attributes:
        loss: Name of the loss.
        acceptance: Whether the rule of acceptance was known; otherwise only S, L and A mean something.
        sums: By (step, mini-batch); mini-batch 0 came before any weight had moved.
        positions: The same.
        problems: What is missing or cannot be read, each with its file.
    """

    loss: str = ""
    acceptance: bool = True
    sums: dict[tuple[int, int], SequenceSums] = field(default_factory=dict)
    positions: dict[tuple[int, int], PositionSums] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def moved(self) -> list[SequenceSums]:
        """The sums of all mini-batches but those with the number 0, in order."""
        return [self.sums[key] for key in sorted(self.sums) if key[1] > 0]


def read_audit(folder: str | Path, run: str = "") -> AuditRecords:
    """Read the files of an audit.

    Args:
        folder: What :class:`Audit` was given.
        run: Which start to read, where the folder holds several.

    Returns:
        The records of all mini-batches that every rank wrote. ``problems`` names a missing rank, a cut line, several
        runs in one folder, and mini-batches that some rank lacks.
    """
    records, folder = AuditRecords(), Path(folder)
    files = sorted(folder.glob(f"{PREFIX}{run}*{SUFFIX}"))
    headers: dict[Path, dict[str, Any]] = {}
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for path in files:
        repeats: dict[tuple[int, int], int] = defaultdict(int)
        for number, line in numbered_lines(path, records.problems):
            if "audit" in line:
                headers[path] = line
                continue
            try:
                key = (int(line["step"]), int(line["minibatch"]))
                sums, positions = from_record(line), positions_from_record(line)
            except (KeyError, TypeError, ValueError) as error:
                records.problems.append(f"{path}:{number}: not a mini-batch of an audit ({error})")
                continue
            repeats[key] += 1
            records.sums[key] = records.sums.get(key, SequenceSums.zeros()) + sums
            records.positions[key] = records.positions.get(key, PositionSums.zeros()) + positions
        for key in repeats:
            counts[key] += 1
    if not headers:
        records.problems.append(f"{folder}: holds no file {PREFIX}*{SUFFIX}; give the folder that FSPO_AUDIT named")
        return records
    first = next(iter(headers.values()))
    records.loss, records.acceptance = first["loss"], first["acceptance"]
    runs = sorted({header["run"] for header in headers.values()})
    if len(runs) > 1:
        records.problems.append(f"{folder}: holds {len(runs)} runs, {', '.join(runs)}; give one of them as --run")
    absent = sorted(set(range(first["ranks"])) - {header["rank"] for header in headers.values()})
    if absent:
        records.problems.append(f"{folder}: of {first['ranks']} ranks, {', '.join(map(str, absent))} wrote nothing")
    for key in [key for key, count in counts.items() if count < len(headers)]:
        records.problems.append(f"{folder}: step {key[0]}, mini-batch {key[1]} is left out: some rank lacks it")
        del records.sums[key], records.positions[key]
    return records


def live_metrics(columns: Mapping[str, Array], acceptance: bool = True) -> dict[str, float]:
    """A handful of numbers of one step, from its sums by fine length bin. Defined here.

    Args:
        columns: :data:`LIVE_COLUMNS`, [K] each.
        acceptance: Whether the rule of acceptance is known.

    Returns:
        ``accept_rate``, ``removed`` (share of sequences whose gradient the clip removes) and ``lre`` (over eight bins
        of equal mass); mean length and standard deviation of S in the shortest and in the longest of these bins. Empty
        before any weight has moved.
    """
    count = columns["count"].sum()
    if count == 0:
        return {}
    starts = equal_mass_starts(columns["count"], _BINS)
    by_bin = {name: merge_bins(column, starts) for name, column in columns.items()}
    n_J = by_bin["count"]
    length_J, mean_J = by_bin["length"] / n_J, by_bin["S"] / n_J
    spread_J = np.sqrt(np.maximum(by_bin["S_squared"] / n_J - mean_J**2, 0.0))
    metrics = {
        "length_short": length_J[0],
        "length_long": length_J[-1],
        "S_std_short": spread_J[0],
        "S_std_long": spread_J[-1],
    }
    if acceptance:
        metrics["accept_rate"] = columns["accepted"].sum() / count
        metrics["removed"] = (columns["clipped_high"] + columns["clipped_low"]).sum() / count
        metrics["lre"] = plain_lre(by_bin["accepted"], n_J)[0]
    return {name: float(value) for name, value in metrics.items()}


def describe(records: AuditRecords) -> str:
    """A table by length of all mini-batches in which the policy had moved, and the LRE with its interval."""
    parts = records.moved()
    if not parts:
        return "no mini-batch in which a weight had moved before: the audit needs two optimizer steps per rollout batch"
    whole = sum(parts, SequenceSums.zeros())
    starts = equal_mass_starts(whole.column("count").numpy(), _BINS)
    names = ("count", "accepted", "clipped_high", "clipped_low", "length", "S", "S_squared")
    n, accepted, high, low, length, s, squared = (merge_bins(whole.column(name).numpy(), starts) for name in names)
    length, s = length / n, s / n
    spread = np.sqrt(np.maximum(squared / n - s**2, 0.0))
    heads = ["mean length", "sequences", "mean S", "std of S", "std / sqrt(L)"]
    columns = [
        [f"{x:.0f}" for x in length],
        [f"{x:.0f}" for x in n],
        [f"{x:+.4f}" for x in s],
        [f"{x:.4f}" for x in spread],
        [f"{x:.4f}" for x in spread / np.sqrt(length)],
    ]
    lines = [f"loss {records.loss or 'not named'}: {len(parts)} mini-batches, {n.sum():.0f} sequences"]
    if records.acceptance:
        heads += ["accepted", "removed, A > 0", "removed, A < 0"]
        columns += [[f"{x:.1%}" for x in share] for share in (accepted / n, high / n, low / n)]
        error = acceptance_counts(stack_sums(parts)).error(starts)
        lines.append(
            f"accepted {error.rate:.1%}; LRE {error.debiased.value:.3f} [{error.debiased.low:.3f}, "
            f"{error.debiased.high:.3f}] (0: acceptance does not depend on length; noise floor {error.noise_floor:.3f})"
        )
    return "\n".join([*lines, "", markdown_table(heads, list(zip(*columns, strict=True)))])


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m fspo.audit FOLDER``; status 1 if something is missing."""
    parser = argparse.ArgumentParser(prog="python -m fspo.audit", description="A table by length of an audit.")
    parser.add_argument("folder", type=Path, help="what FSPO_AUDIT named")
    parser.add_argument("--run", default="", help="one of several starts in the folder")
    chosen = parser.parse_args(arguments)
    records = read_audit(chosen.folder, chosen.run)
    for problem in records.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if records.sums:
        print(describe(records))
    return 1 if records.problems else 0


if __name__ == "__main__":
    sys.exit(main())
