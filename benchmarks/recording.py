"""``python -m benchmarks.recording``: what recording responses costs a step (docs/tables/performance-overhead.csv).

The size is that of ``experiment=qwen3_8b`` on 8 GPUs: 8,192 responses a step, 128 micro-batches of 8 in each rank. A
part of a worker is what verl does with a micro-batch: loss, backward, metrics; alone, and with the audit that
``FSPO_AUDIT`` adds. A part of the driver is what this recipe does with the rows of a step. Log-probabilities are
simulated; all else is the code of a run. Counted is processor time of one thread, by turns, so that a busy machine
changes all parts alike; on GPUs the ranks' parts run side by side.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

os.environ.setdefault("VERL_PLATFORM", "cpu")

import numpy as np
import torch

from benchmarks.loss import random_batch, step, verl_losses
from benchmarks.pages import Table, write_tables
from fspo.diagnostics import LengthDiagnostics
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.responses import Responses, rows_of
from fspo.table import Rows, TableWriter, join_rows

MICRO: Final = 8
WIDTH: Final = 8192
RANKS: Final = 8
MICRO_BATCHES: Final = 128
MINI_BATCHES: Final = 4
WINDOW_STEPS: Final = 20  # conf/base.yaml, fspo.window_steps
TURNS: Final = 60
#: Enough for parts to be closed and merged several times.
STEPS: Final = 96


def _times(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Milliseconds of processor time of each call, by turns, after two turns that do not count."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 2):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if turn >= 2:
                taken[name].append(1e3 * (time.process_time() - start))
    return taken


def worker_parts() -> dict[str, list[float]]:
    """A micro-batch in verl's losses: alone, and audited."""
    from recipe.fspo.policy_loss import observe_losses
    from recipe.fspo.recorder import RECORDER

    batch = random_batch(MICRO, WIDTH, "cpu")
    alone = verl_losses(batch)
    observe_losses()
    audited = {f"{name}, audited": loss for name, loss in verl_losses(batch).items()}
    audited["fspo, recorded"] = verl_losses(batch, ["fspo"])["verl fspo"]
    RECORDER.enable(max_response_length=WIDTH)

    def turn(loss: Callable[[], torch.Tensor]) -> None:
        RECORDER.begin_mini_batch()
        step(loss, batch)

    return _times({name: partial(turn, loss) for name, loss in (alone | audited).items()}, TURNS)


def rows_of_step(number: int) -> list[Rows]:
    """The rows of each mini-batch of a step."""
    batch, per_batch = random_batch(64, WIDTH, "cpu"), RANKS * MICRO_BATCHES * MICRO // MINI_BATCHES
    output = sequence_policy_loss(
        batch.log_prob_BT, batch.old_log_prob_BT, batch.advantages_BT, batch.mask_BT, ALGORITHMS["fspo"]
    )
    rows = rows_of(output)
    many = {name: np.tile(values, per_batch // len(values)) for name, values in rows.items()}
    generator = np.random.default_rng(number)
    parts = []
    for index in range(MINI_BATCHES):
        noise_B = generator.normal(0, 0.05, per_batch).astype(np.float32)
        place = {"step": number, "update": index, "minibatch": index}
        whole = {name: np.full(per_batch, value) for name, value in place.items()}
        parts.append({**whole, **many, "S": many["S"] + noise_B, "Q": noise_B**2})
    return parts


def driver_parts(folder: Path) -> dict[str, list[float]]:
    """The rows of a step: into the table, and into the length statistics of the last steps."""
    writer = TableWriter(folder, {"loss": "fspo", "rule": "known"}, run="run", first_step=1)
    diagnostics = LengthDiagnostics(window=WINDOW_STEPS)
    taken: dict[str, list[float]] = {"append to the table": [], "statistics by length": []}
    for number in range(1, STEPS + 1):
        rows = join_rows(rows_of_step(number))
        for name, call in (
            ("append to the table", partial(writer.append, rows)),
            ("statistics by length", partial(diagnostics.update, Responses.of_rows(rows))),
        ):
            start = time.process_time()
            call()
            taken[name].append(1e3 * (time.process_time() - start))
    return taken


def table() -> Table:
    """Each part: median, mean and maximum in milliseconds of processor time."""
    torch.set_num_threads(1)
    rows = [["part", "where", "turns", "median ms", "mean ms", "largest ms", "ms a step (mean)"]]
    with tempfile.TemporaryDirectory() as folder:
        for place, parts, times in (
            ("worker", worker_parts(), MICRO_BATCHES),
            ("driver", driver_parts(Path(folder)), 1),
        ):
            for name, taken in parts.items():
                mean, numbers = statistics.mean(taken), (statistics.median(taken), statistics.mean(taken), max(taken))
                rows.append([name, place, str(len(taken)), *(f"{x:.1f}" for x in numbers), f"{times * mean:.0f}"])
    return rows


if __name__ == "__main__":
    write_tables({"performance-overhead": table()})
