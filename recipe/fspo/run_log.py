"""Writes a run's ``metrics.jsonl`` and ``length_stats.jsonl`` (docs/run-folder.md), and its progress lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from fspo.records import to_record
from fspo.sums import SequenceSums
from recipe.fspo.progress import PROGRESS, step_line, validation_line
from recipe.fspo.recorder import SequenceArrays

METRICS_FILE = "metrics.jsonl"
LENGTH_STATS_FILE = "length_stats.jsonl"
SEQUENCES_FILE = "sequences.jsonl"
_SEQUENCE_COLUMNS = ("S", "L", "A", "weight")


def _json_number(value: Any) -> float | int | None:
    """A number that JSON can hold: NaN and infinities become null."""
    value = value.item() if isinstance(value, np.generic) else value
    return value if not isinstance(value, float) or math.isfinite(value) else None


class RunLog:
    """A logger beside verl's own (it has their ``log(data, step)``), whose files are always there."""

    def __init__(self, config: DictConfig, total_steps: int) -> None:
        self._folder = Path(config.fspo.run_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._total_steps = total_steps

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Append one line of metrics and tell the person who watches."""
        metrics = {name: _json_number(value) for name, value in data.items()}
        self._append(METRICS_FILE, [{"step": step, "metrics": metrics}])
        if "timing_s/step" in metrics:
            PROGRESS.say(step_line(step, self._total_steps, metrics))
        validation = validation_line(step, metrics)
        if validation:
            PROGRESS.say(validation)

    def record_mini_batches(self, step: int, mini_batches: Sequence[SequenceSums]) -> None:
        """Append the exact sums by length of one step, a line per mini-batch."""
        records = [to_record(sums, step=step, minibatch=index) for index, sums in enumerate(mini_batches)]
        self._append(LENGTH_STATS_FILE, records)

    def record_sequences(self, step: int, mini_batches: Sequence[SequenceArrays]) -> None:
        """Append S, L, A and weight of every sequence of one step, a line per mini-batch."""
        self._append(
            SEQUENCES_FILE,
            [
                {"step": step, "minibatch": index}
                | {name: [float(f"{x:.7g}") for x in row] for name, row in zip(_SEQUENCE_COLUMNS, rows, strict=True)}
                for index, rows in enumerate(mini_batches)
            ],
        )

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        # One write per call: a kill costs at most the last line, which readers name and skip.
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(text)
