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
from fspo.records import to_record
from fspo.rewards import status_rates
from fspo.sums import SequenceSums
from recipe.runner.launch.compose import compose
from recipe.runner.plan.__main__ import plan
from recipe.runner.plan.setup import Hardware

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


def _registered_loss(name: str, batch: Batch) -> Callable[[], torch.Tensor]:
    """A loss of the package as verl calls it: metrics and recorder included."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    import recipe.fspo.policy_loss  # noqa: F401

    config = OmegaConf.create({"policy_loss": {"loss_mode": name}, "global_batch_info": {}})
    config.global_batch_info = {"dp_size": 1, "global_batch_size": batch.log_prob_BT.shape[0]}
    loss = get_policy_loss_fn(name)

    def call() -> torch.Tensor:
        value, _ = loss(
            old_log_prob=batch.old_log_prob_BT,
            log_prob=batch.log_prob_BT,
            advantages=batch.advantages_BT,
            response_mask=batch.response_mask_BT,
            config=config,
        )
        return value

    return call


def _worker_parts(sequences_per_rank: int) -> list[Part]:
    from recipe.fspo.recorder import RECORDER

    RECORDER.enable(max_response_length=WIDTH)
    RECORDER.begin_mini_batch()
    whole, small = Batch.random(ROWS, WIDTH, "cpu"), Batch.random(MICRO, WIDTH, "cpu")
    times, small_times = sequences_per_rank / ROWS, sequences_per_rank / MICRO
    theirs, theirs_small = verl_losses(whole), verl_losses(small)
    output = sequence_policy_loss(
        whole.log_prob_BT, whole.old_log_prob_BT, whole.advantages_BT, whole.response_mask_BT, ALGORITHMS["fspo"]
    )
    sums = SequenceSums.zeros()
    return [
        Part(REFERENCE, "worker", partial(step, theirs_small["verl gspo"], small), small_times, False),
        Part(
            f"verl vanilla, {MICRO} x {WIDTH}",
            "worker",
            partial(step, theirs_small["verl vanilla"], small),
            small_times,
            False,
        ),
        Part(
            f"fspo with recorder, {MICRO} x {WIDTH}",
            "worker",
            partial(step, _registered_loss("fspo", small), small),
            small_times,
        ),
        Part(f"verl gspo, {ROWS} x {WIDTH}", "worker", partial(step, theirs["verl gspo"], whole), times, False),
        Part(f"verl vanilla, {ROWS} x {WIDTH}", "worker", partial(step, theirs["verl vanilla"], whole), times, False),
        Part(
            f"fspo with recorder, {ROWS} x {WIDTH}",
            "worker",
            partial(step, _registered_loss("fspo", whole), whole),
            times,
            False,
        ),
        Part(f"of which SequenceSums.add_, {ROWS} sequences", "worker", lambda: sums.add_(output), times, False),
    ]


def _driver_parts(sequences: int, folder: str) -> list[Part]:
    from recipe.fspo.recorder import MiniBatch, join_ranks
    from recipe.runner.launch.run_folder import RunLog

    batch = Batch.random(sequences // RANKS // MINI_BATCHES, WIDTH, "cpu")
    output = sequence_policy_loss(
        batch.log_prob_BT, batch.old_log_prob_BT, batch.advantages_BT, batch.response_mask_BT, ALGORITHMS["fspo"]
    )
    sums = SequenceSums.zeros().add_(output)
    # Copies, since pickle writes an object that it meets again as a reference.
    ranks = [[MiniBatch(copy.deepcopy(sums), np.empty((4, 0))) for _ in range(MINI_BATCHES)] for _ in range(RANKS)]
    joined = [mini_batch.sums for mini_batch in join_ranks(ranks)]
    diagnostics = LengthDiagnostics(bins=8, window=WINDOW_STEPS)
    for _ in range(WINDOW_STEPS):
        diagnostics.update(joined)
    controller = BandController(ALGORITHMS["fspo_quantile"], window=8)
    for _ in range(8):
        controller.update(joined)
    log = RunLog(OmegaConf.create({"fspo": {"run_dir": folder}}), total_steps=1)
    metrics = diagnostics.update(joined)
    length_B = torch.randint(1, WIDTH + 1, (sequences,))
    rewards = torch.nested.nested_tensor([torch.zeros(int(n)) for n in length_B], layout=torch.jagged)

    def outcomes() -> None:  # what recipe.fspo.accounting.outcomes does with the batch once it is read
        reward_B = torch.tensor([float(scores.sum()) for scores in rewards.unbind()])
        diagnostics.outcome_metrics("reward", reward_B, length_B)
        diagnostics.outcome_metrics("acc", reward_B, length_B)
        status_rates("correct" for _ in range(sequences))

    return [
        Part(
            "sums of 8 ranks: pickled, unpickled, added",
            "driver",
            lambda: join_ranks([pickle.loads(pickle.dumps(rank, protocol=5)) for rank in ranks]),
            1,
        ),
        Part(
            f"LengthDiagnostics.update, window of {WINDOW_STEPS} steps", "driver", lambda: diagnostics.update(joined), 1
        ),
        Part("BandController.update (quantile band)", "driver", lambda: controller.update(joined), 1),
        Part("records and metrics to the run folder", "driver", lambda: _write(log, joined, metrics), 1),
        Part("outcome metrics", "driver", outcomes, 1),
    ]


def _write(log: Any, joined: list[SequenceSums], metrics: dict[str, float]) -> None:
    log.append("length_stats.jsonl", [to_record(sums, step=1, minibatch=i) for i, sums in enumerate(joined)])
    log.log(metrics, 1)


def measure(parts: list[Part], repeats: int) -> dict[str, float]:
    """Median seconds of each part, by turns, of which the first is left out."""
    seconds = alternated({part.name: part.call for part in parts}, repeats, 1)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Entry point of ``python -m benchmarks.overhead``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed turns of each part, at least 5")
    repeats = max(5, parser.parse_args().repeats)
    torch.set_num_threads(1)
    planned = plan(compose(EXPERIMENT), Hardware())
    step_s, sequences = planned["time_s"]["total"], planned["setup"]["prompts"] * planned["setup"]["n"]
    with tempfile.TemporaryDirectory() as folder:
        parts = [*_worker_parts(sequences // RANKS), *_driver_parts(sequences, folder)]
        seconds = measure(parts, repeats)
    reference = seconds[REFERENCE] * parts[0].per_step
    total = sum(part.per_step * seconds[part.name] for part in parts if part.counts)
    print(f"step: {sequences} sequences on {RANKS} ranks, {step_s:.0f} s by the planner; {WIDTH} tokens wide; ", end="")
    print(f"medians of {repeats} alternated turns, one CPU thread\n")
    print("| part | where | median ms | times a step | ms a step | % of the step | % of verl's gspo loss |")
    print("|" + " --- |" * 7)
    for part in parts:
        spent = part.per_step * seconds[part.name]
        print(
            f"| {part.name} | {part.place} | {1e3 * seconds[part.name]:.1f} | {part.per_step:g} | {1e3 * spent:.0f} "
            f"| {100 * spent / step_s:.4f} | {100 * spent / reference:.1f} |"
        )
    beyond = total - reference
    print(f"| **all of the recipe's** | | | | **{1e3 * total:.0f}** | **{100 * total / step_s:.3f}** | ", end="")
    print(f"**{100 * total / reference:.1f}** |")
    print(f"| **beyond verl's gspo loss** | | | | **{1e3 * beyond:.0f}** | **{100 * beyond / step_s:.3f}** | ", end="")
    print(f"**{100 * beyond / reference:.1f}** |")


if __name__ == "__main__":
    main()
