"""What this recipe adds to a training step, at the size of experiment=qwen3_8b on 8 GPUs.

``python -m benchmarks.overhead`` prints a Markdown table: each part's median time on one CPU thread, its multiple per
step, and its share of (a) the step that the planner predicts and (b) the time of verl's own ``gspo`` loss for the
step's sequences, measured side by side. Counted is the loss in micro-batches of the size that a run has; the same
sequences as two batches of 512 x 8192 are shown for comparison. Log-probs are simulated, everything else is the code
that a run executes: the registered loss with its recorder, transport of the sums, diagnostics, calibration, records and
outcome metrics.

Parts of a worker run in all ranks at once and on a GPU in a run; parts of the driver follow each other on a CPU. What
verl itself does for the recipe is not in it: the two remote calls per step, and reading responses and rewards from
TransferQueue.
"""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")

import numpy as np
import torch
from omegaconf import OmegaConf

from benchmarks.loss import Batch, alternated, step, verl_losses
from fspo.calibration import BandController
from fspo.diagnostics import LengthDiagnostics
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.markdown import markdown_table
from fspo.positions import PositionSums
from fspo.records import to_record
from fspo.rewards import status_rates
from fspo.sums import SequenceSums
from recipe.fspo.job import JOB, compose
from recipe.runner.plan.prediction import plan

ROWS, WIDTH, RANKS, MINI_BATCHES = 512, 8192, 8, 4
#: Sequences of a micro-batch in a run: its budget of 20,480 tokens over the expected 2,256 of a sequence.
MICRO = 8
REFERENCE = f"verl gspo, {MICRO} x {WIDTH}"
WINDOW_STEPS = 20  # conf/base.yaml, fspo.window_steps
EXPERIMENT = ["experiment=qwen3_8b", "trainer.nnodes=1", f"trainer.n_gpus_per_node={RANKS}"]


@dataclass(frozen=True)
class Part:
    """One measured call, and how often a step makes it."""

    name: str
    place: str
    call: Callable[[], Any]
    per_step: float
    counts: bool = True


def _worker_parts(sequences_per_rank: int) -> list[Part]:
    from recipe.fspo.recorder import RECORDER

    RECORDER.enable(max_response_length=WIDTH)
    RECORDER.begin_mini_batch()
    from recipe.fspo.policy_loss import observe_losses

    whole = Batch.random(ROWS, WIDTH, "cpu")
    output = sequence_policy_loss(*whole.tensors, ALGORITHMS["fspo"])
    sums = SequenceSums.zeros()
    names = {"gspo": "verl gspo", "vanilla": "verl vanilla", "fspo": "fspo with recorder"}
    parts = []
    for batch in (Batch.random(MICRO, WIDTH, "cpu"), whole):
        rows = len(batch.log_prob_BT)
        losses = verl_losses(batch, names)
        parts += [
            Part(
                f"{title}, {rows} x {WIDTH}",
                "worker",
                partial(step, losses[f"verl {name}"], batch),
                sequences_per_rank / rows,
                counts=(name, rows) == ("fspo", MICRO),
            )
            for name, title in names.items()
        ]
    observe_losses()  # as FSPO_AUDIT does in plain verl
    batch, times = Batch.random(MICRO, WIDTH, "cpu"), sequences_per_rank / MICRO
    parts += [
        Part(f"{name} audited, {MICRO} x {WIDTH}", "worker", partial(step, loss, batch), times, counts=False)
        for name, loss in verl_losses(batch).items()
    ]
    title = f"of which SequenceSums.add_, {ROWS} sequences"
    return [*parts, Part(title, "worker", lambda: sums.add_(output), sequences_per_rank / ROWS, counts=False)]


def _driver_parts(sequences: int, folder: str) -> list[Part]:
    from recipe.fspo.recorder import MiniBatch, join_ranks
    from recipe.runner.launch.run_folder import RunLog

    batch = Batch.random(sequences // RANKS // MINI_BATCHES, WIDTH, "cpu")
    sums = SequenceSums.zeros().add_(sequence_policy_loss(*batch.tensors, ALGORITHMS["fspo"]))

    # Copies, since pickle writes an object that it meets again as a reference.
    def recorded() -> MiniBatch:
        return MiniBatch(copy.deepcopy(sums), PositionSums.zeros(), np.empty((4, 0)))

    ranks = [[recorded() for _ in range(MINI_BATCHES)] for _ in range(RANKS)]
    joined = [mini_batch.sums for mini_batch in join_ranks(ranks)]
    diagnostics = LengthDiagnostics(bins=8, window=WINDOW_STEPS)
    for _ in range(WINDOW_STEPS):
        diagnostics.update(joined)
    controller = BandController(ALGORITHMS["fspo_quantile"], window=8)
    for _ in range(8):
        controller.update(joined)
    log = RunLog(OmegaConf.create({"run": {"dir": folder}}), total_steps=1)
    metrics = diagnostics.update(joined)
    length_B = torch.randint(1, WIDTH + 1, (sequences,))
    rewards = torch.nested.nested_tensor([torch.zeros(int(n)) for n in length_B], layout=torch.jagged)

    def outcomes() -> None:  # what recipe.fspo.accounting.outcomes does with the batch once it is read
        reward_B = torch.tensor([float(scores.sum()) for scores in rewards.unbind()])
        diagnostics.outcome_metrics("reward", reward_B, length_B)
        diagnostics.outcome_metrics("acc", reward_B, length_B)
        status_rates("correct" for _ in range(sequences))

    def sent() -> None:
        join_ranks([pickle.loads(pickle.dumps(rank, protocol=5)) for rank in ranks])

    def written() -> None:
        log.append("length_stats.jsonl", [to_record(sums, step=1, minibatch=i) for i, sums in enumerate(joined)])
        log.log(metrics, 1)

    return [
        Part("sums of 8 ranks: pickled, unpickled, added", "driver", sent, 1),
        Part(
            f"LengthDiagnostics.update, window of {WINDOW_STEPS} steps",
            "driver",
            partial(diagnostics.update, joined),
            1,
        ),
        Part("BandController.update (quantile band)", "driver", partial(controller.update, joined), 1),
        Part("records and metrics to the run folder", "driver", written, 1),
        Part("outcome metrics", "driver", outcomes, 1),
    ]


def main() -> None:
    """Entry point of ``python -m benchmarks.overhead``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed turns of each part, at least 5")
    repeats = max(5, parser.parse_args().repeats)
    torch.set_num_threads(1)
    planned = plan(compose(EXPERIMENT), JOB)
    step_s, sequences = planned.time["total"], planned.setup.sequences
    with tempfile.TemporaryDirectory() as folder:
        parts = [*_worker_parts(sequences // RANKS), *_driver_parts(sequences, folder)]
        turns = alternated({part.name: part.call for part in parts}, repeats, 1)
    seconds = {name: statistics.median(values) for name, values in turns.items()}
    reference = seconds[REFERENCE] * parts[0].per_step
    print(f"step: {sequences} sequences on {RANKS} ranks, {step_s:.0f} s by the planner; {WIDTH} tokens wide; ", end="")
    print(f"medians of {repeats} alternated turns, one CPU thread\n")
    rows = []
    for part in parts:
        spent = part.per_step * seconds[part.name]
        numbers = (f"{1e3 * seconds[part.name]:.1f}", f"{part.per_step:g}", f"{1e3 * spent:.0f}")
        rows.append([part.name, part.place, *numbers, f"{100 * spent / step_s:.4f}", f"{100 * spent / reference:.1f}"])
    total = sum(part.per_step * seconds[part.name] for part in parts if part.counts)
    for name, spent in (("all of the recipe's", total), ("beyond verl's gspo loss", total - reference)):
        numbers = (f"{1e3 * spent:.0f}", f"{100 * spent / step_s:.3f}", f"{100 * spent / reference:.1f}")
        rows.append([f"**{name}**", "", "", "", *(f"**{number}**" for number in numbers)])
    heads = ("part", "where", "median ms", "times a step", "ms a step", "% of the step", "% of verl's gspo loss")
    print(markdown_table(heads, rows))


if __name__ == "__main__":
    main()
