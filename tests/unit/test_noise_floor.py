"""The noise floor of S: what is measured, what it is held against, and the warning."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fspo.fairness import equal_mass_starts
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.noise_floor import NoiseFloor, noise_floor
from fspo.sums import SequenceSums
from recipe.fspo.recorder import MiniBatch, Recorder, count_unmoved
from recipe.runner.faults.nonfinite import UpdateRefused, guarded_update

LENGTHS = (16, 64, 256)


def measured(per_token: float, algo: str = "fspo") -> NoiseFloor:
    """Noise of independent rounding: S is normal with standard deviation ``per_token * sqrt(L)``."""
    generator = torch.Generator().manual_seed(0)
    rows = [length for length in LENGTHS for _ in range(500)]
    mask = torch.arange(max(LENGTHS)) < torch.tensor(rows)[:, None]
    old = torch.full(mask.shape, -1.0, dtype=torch.float64)
    new = old + per_token * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    output = sequence_policy_loss(new, old, torch.ones_like(old), mask, ALGORITHMS[algo])
    sums = SequenceSums.zeros().add_(output)
    starts = equal_mass_starts(sums.column("count").numpy(), len(LENGTHS))
    return noise_floor([sums], starts, ALGORITHMS[algo])


def test_the_noise_is_that_of_each_length_and_the_margin_that_of_the_band() -> None:
    floor = measured(0.001)
    assert floor.length_J.tolist() == list(LENGTHS)
    for length, rms, width in zip(LENGTHS, floor.rms_J, floor.half_width_J, strict=True):
        assert rms == pytest.approx(0.001 * math.sqrt(length), rel=0.1)
        assert width == pytest.approx(0.03 * math.sqrt(length))
    assert floor.margin == pytest.approx(30, rel=0.1)
    assert floor.warning() is None
    assert set(floor.metrics()) == {*(f"fspo/noise_floor/S_rms/bin_0{j}" for j in range(3)), "fspo/noise_floor/margin"}


@pytest.mark.parametrize(("algo", "per_token", "warns"), [("fspo", 0.01, True), ("fspo", 0.005, False)])
def test_a_band_within_five_times_the_noise_is_warned_of(algo: str, per_token: float, warns: bool) -> None:
    warning = measured(per_token, algo).warning()
    assert (warning is not None) == warns
    if warning:
        assert "pad_to_length=true" in warning and "fp16" in warning


def test_a_linear_band_is_closest_to_the_noise_at_short_lengths() -> None:
    floor = measured(1e-4, "seq_gspo")
    assert floor.margin == pytest.approx(3e-4 * math.sqrt(LENGTHS[0]) / 1e-4, rel=0.1)


def test_no_noise_and_no_band_give_no_margin() -> None:
    exact = measured(0.0)
    assert exact.margin == math.inf and "fspo/noise_floor/margin" not in exact.metrics()
    starts = equal_mass_starts(SequenceSums.zeros().column("count").numpy(), 3)
    nothing = noise_floor([], starts)
    assert math.isnan(nothing.margin) and nothing.warning() is None


def mini_batch(learning_rate: float | None, grad_norm: float | None = 1.0) -> MiniBatch:
    recorder = Recorder()
    recorder.enable(max_response_length=8)
    recorder.begin_mini_batch()
    recorder.end_mini_batch(grad_norm, learning_rate)
    return recorder.pop()[0]


@pytest.mark.parametrize(
    ("steps", "unmoved"),
    [
        ([(1e-6, 1.0), (1e-6, 1.0), (1e-6, 1.0)], 1),
        ([(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)], 3),  # a warm-up begins with a learning rate of 0
        ([(1e-6, math.inf), (1e-6, 1.0), (1e-6, 1.0)], 2),  # a step that the gradient scaler skipped
        ([(None, None)], 1),
    ],
)
def test_mini_batches_before_the_first_step_that_moves_are_unmoved(
    steps: list[tuple[float | None, float | None]], unmoved: int
) -> None:
    assert count_unmoved([mini_batch(*step) for step in steps]) == unmoved


def test_a_gradient_scaler_may_skip_steps(tmp_path: Path) -> None:
    with guarded_update({}, tmp_path, 0, ValueError, may_skip=True) as metrics:
        metrics["grad_norm"] = math.inf
    with pytest.raises(UpdateRefused), guarded_update({}, tmp_path, 0, ValueError) as metrics:
        metrics["grad_norm"] = math.inf
