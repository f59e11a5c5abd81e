"""Golden trajectories of the losses: a small, repeatable training of every algorithm, recorded number by number.

    python -m benchmarks.golden            compare the code with the record, as a table to put into a pull request
    python -m benchmarks.golden --write    record the code as it is

A bigram model of 12 tokens takes 18 optimizer steps (6 rounds of 3 mini-batches) on fixed responses with fixed
advantages, in float64. All steps have the same size, so that algorithms of different gradient scale move alike. It
shows what a change does to a loss and its bands, not whether an algorithm learns. verl's own losses are recorded too: a
new pin may change them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.losses import of_verl
from fspo.check_loss.call import Batch, PolicyLoss
from fspo.kept import UnclippedWeight, kept_output
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.markdown import markdown_table
from fspo.measured import DriftMeasurement
from fspo.responses import Responses, rows_of
from fspo.types import SequenceLossOutput, SequenceLossSettings

RECORD: Final = Path(__file__).resolve().parents[1] / "tests" / "unit" / "assets" / "golden_trajectories.json"
TOLERANCE: Final = 1e-9
"""Relative: float64 sums differ by less between machines, a changed formula by more. Values are kept to 12 digits."""

TOKENS, ROUNDS, MINI_BATCHES, SEQUENCES, LONGEST = 12, 6, 3, 24, 96
STEP: Final = 0.25

VARIANTS: Final[dict[str, SequenceLossSettings]] = {
    **ALGORITHMS,
    "seq_rloo_guard": dataclasses.replace(ALGORITHMS["seq_rloo"], s_max=0.1),
}

#: verl's own losses by the name of their trajectory: loss_mode, what it weighs a token by, averaging, and clips at
#: which this small training leaves none of their branches out.
VERLS: Final[dict[str, tuple[str, UnclippedWeight, str, dict[str, float]]]] = {
    "sapo": ("sapo", "token", "seq-mean-token-mean", {"tau_pos": 20.0, "tau_neg": 30.0}),
    "gmpo": (
        "geo_mean", "length_normalised", "seq-mean-token-mean", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}
    ),
    "cispo": ("cispo", "token", "token-mean", {"clip_ratio_low": 10.0, "clip_ratio_high": 0.02}),
    "dppo_tv": (
        "dppo_tv", "token", "token-mean", {"clip_ratio_low": 0.002, "clip_ratio_high": 0.003, "clip_ratio_c": 1.05}
    ),
    "dppo_kl": (
        "dppo_kl", "token", "token-mean", {"clip_ratio_low": 2e-5, "clip_ratio_high": 3e-5, "clip_ratio_c": 1.05}
    ),
}  # fmt: skip

Trajectory = dict[str, list[float]]
#: Loss of a mini-batch and what it does to each sequence, of log_prob, old_log_prob, advantages, mask and its position.
Loss = Callable[..., tuple[torch.Tensor, SequenceLossOutput]]


def _round(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Responses (with the token before the first), mask and advantages of a round; lengths log-uniform from 1 on."""
    draw = np.random.default_rng([2509, 9177, index])
    rows = MINI_BATCHES * SEQUENCES
    tokens = torch.from_numpy((draw.random((rows, LONGEST + 1)) * TOKENS).astype(np.int64))
    length = torch.from_numpy(np.exp(draw.random(rows) * np.log(LONGEST)).astype(np.int64))
    mask = torch.arange(LONGEST) < length[:, None]
    advantages = torch.from_numpy(np.where(draw.random(rows) < 0.5, 1.0, -0.8))[:, None].expand(rows, LONGEST)
    return tokens, mask, advantages


def _log_prob(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    table = logits.log_softmax(dim=-1)
    return table[tokens[:, :-1], tokens[:, 1:]]


def with_kept(loss: PolicyLoss, weight: UnclippedWeight) -> Loss:
    """A loss of verl's, with what it keeps."""

    def both(
        new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, SequenceLossOutput]:
        def gradient(log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
            return loss.gradient(Batch(log_prob, old, advantages, mask))[0]

        output = kept_output(gradient, new, old, advantages, mask, weight)
        return loss.value(Batch(new, old, advantages, mask)), output

    return both


def trajectory(settings: SequenceLossSettings) -> Trajectory:
    """What is recorded of a member of the family, by mini-batch."""
    controller = DriftMeasurement() if settings.needs_state else None

    def both(*batch: torch.Tensor, mini_batch: int) -> tuple[torch.Tensor, SequenceLossOutput]:
        state = () if controller is None else (controller.state.at_mini_batch(mini_batch),)
        output = sequence_policy_loss(*batch, settings, *state)
        return output.loss_B.mean(), output

    return trajectory_of(both, controller)


def trajectory_of(both: Loss, controller: DriftMeasurement | None = None) -> Trajectory:
    """What is recorded of any loss, by mini-batch."""
    logits = torch.zeros(TOKENS, TOKENS, dtype=torch.float64, requires_grad=True)
    recorded: Trajectory = defaultdict(list)
    for index in range(ROUNDS):
        tokens, mask, advantages = _round(index)
        old = _log_prob(logits.detach(), tokens)
        parts = []
        for k in range(MINI_BATCHES):
            rows = slice(k * SEQUENCES, (k + 1) * SEQUENCES)
            new = _log_prob(logits, tokens[rows])
            loss, output = both(new, old[rows], advantages[rows], mask[rows], mini_batch=k)
            (gradient,) = torch.autograd.grad(loss, logits)
            norm = gradient.norm()
            with torch.no_grad():
                logits -= STEP * gradient / norm if norm > 0 else 0.0
            parts.append(Responses.of_rows(rows_of(output) | {"update": k, "minibatch": k}))
            values = {
                "loss": loss,
                "gradient": norm,
                "S_mean": output.log_ratio_B.mean(),
                "S_std": output.log_ratio_B.std(),
                "accepted": output.accepted_B.sum(),
                "high": output.clipped_high_B.sum(),
                "low": output.clipped_low_B.sum(),
                "overflow": output.overflow_B.sum(),
                "upper": output.upper_B.mean(),
            }
            for name, value in values.items():
                recorded[name].append(float(f"{float(value.detach()):.12g}"))
        if controller is not None:
            controller.update(Responses.join(parts))
    if not np.isfinite(recorded["upper"]).all() or max(recorded["upper"]) > 1e20:
        del recorded["upper"]  # no band on S
    return recorded


def trajectories() -> dict[str, Trajectory]:
    """Those of all variants, then of the losses that are not of the family."""
    recorded = {name: trajectory(settings) for name, settings in VARIANTS.items()}
    for name, (mode, weight, aggregation, clips) in VERLS.items():
        recorded[name] = trajectory_of(with_kept(of_verl(mode, loss_agg_mode=aggregation, **clips), weight))
    return recorded


def differences(before: dict[str, Trajectory], after: dict[str, Trajectory]) -> list[list[str]]:
    """Algorithm and name of each recorded quantity that has changed, where, from what to what, and by how much."""
    rows = []
    names = {(variant, name) for one in (before, after) for variant in one for name in one[variant]}
    for algorithm, name in sorted(names):
        old, new = (one.get(algorithm, {}).get(name, [np.nan]) for one in (before, after))  # nan: not there
        gaps = np.abs(np.subtract(old, new)) / np.maximum(np.maximum(np.abs(old), np.abs(new)), 1e-12)
        if len(changed := np.flatnonzero(~(gaps <= TOLERANCE))):
            k = int(changed[0])
            rows.append([algorithm, name, str(k), f"{old[k]:.6g}", f"{new[k]:.6g}", f"{gaps.max():.2g}"])
    return rows


def _as_text(recorded: dict[str, Trajectory]) -> str:
    """JSON with one quantity a line, so that a change can be read in a diff."""
    variants = [
        f"{json.dumps(variant)}: {{\n"
        + ",\n".join(f" {json.dumps(name)}: {json.dumps(values)}" for name, values in quantities.items())
        for variant, quantities in recorded.items()
    ]
    return "{\n" + "\n},\n".join(variants) + "\n}\n}\n"


def main() -> None:
    """Command line. Exit status: 0, or 1 if something has changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RECORD.name} anew")
    write = parser.parse_args().write
    after = trajectories()
    before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    rows = differences(before, after)
    if rows:
        heads = ("algorithm", "quantity", "first mini-batch", "before", "after", "largest relative change")
        print(markdown_table(heads, rows))
    else:
        print(f"{len(after)} trajectories are as recorded")
    if write:
        RECORD.write_text(_as_text(after), encoding="utf-8")
    elif rows:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
