"""Step metrics against one pass over the sequences; windows, noise floor, documentation of names."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import loss_output, responses_of

from fspo.fairness.lre import length_reweighting_error
from fspo.losses import ALGORITHMS, judged
from fspo.metrics import LengthDiagnostics, noise_floor, step_metrics
from fspo.responses import Responses
from fspo.types import BandState, SequenceLossOutput

ROOT = Path(__file__).resolve().parents[2]
FSPO = ALGORITHMS["fspo"]


def sequences(seed: int, count: int = 96, scale: float = 0.03) -> SequenceLossOutput:
    return loss_output(count, 120, seed=seed, scale=scale, shortest=1)


def normal(length_B: torch.Tensor, sigma: float, drift_per_token: float = 0.0) -> Responses:
    """S is normal about -drift L with a standard deviation of sigma sqrt(L), in a mini-batch after a moved weight."""
    noise_B = torch.randn(len(length_B), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s_B = sigma * length_B.sqrt() * noise_B - drift_per_token * length_B
    return responses_of(judged(s_B, length_B, torch.ones(len(length_B)), FSPO), first_number=1)


def minibatches(seed: int) -> Responses:
    """Four, the first with S = 0, as after a rollout."""
    return responses_of(*(sequences(seed * 10 + i, scale=0.03 if i else 0.0) for i in range(4)))


def test_step_metrics_equal_one_pass_over_the_sequences() -> None:
    output = sequences(1, 200)
    columns = (output.log_ratio_B, output.length_B, output.accepted_B, output.clipped_high_B, output.clipped_low_B)
    s, length, accepted, high, low = (column.numpy() for column in columns)
    z, mu = s / np.sqrt(length), s.sum() / length.sum()
    expected = {
        "fspo/sequences": len(s),
        "fspo/accept_rate": accepted.mean(),
        "fspo/clip_frac": 1 - accepted.mean(),
        "fspo/clip_high_frac": high.mean(),
        "fspo/clip_low_frac": low.mean(),
        "fspo/drift_per_token": mu,
        "fspo/sigma_hat": ((s - mu * length) / np.sqrt(length)).std(),
        "fspo/z_std": z.std(),
    }
    assert step_metrics(responses_of(output)) == pytest.approx(expected, rel=1e-9)


def test_every_metric_is_documented_and_every_documented_one_occurs() -> None:
    diagnostics = LengthDiagnostics()
    for seed in (2, 3):  # an interval needs eight mini-batches
        diagnostics.update(minibatches(seed))
    metrics = diagnostics.update(minibatches(1)) | diagnostics.outcome_metrics("x", torch.ones(9), torch.arange(0, 9))
    metrics |= noise_floor(minibatches(1).moved(), settings=FSPO).metrics()
    page = (ROOT / "docs/fairness.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(fspo/[^`]+)` \|", page, re.M))
    names = {re.sub(r"bin_\d+", "bin_{bin}", name.replace("outcome/x", "outcome/{name}")) for name in metrics}
    # The recipe adds some, whose names stand in its code.
    code = [path.read_text(encoding="utf-8") for path in (ROOT / "recipe/fspo").rglob("*.py")]
    assert explained == names | {name for text in code for name in re.findall(r'"(fspo/[a-z_/]+)"', text)}
    assert all(np.isfinite(value) for value in metrics.values())


def test_the_first_mini_batch_is_left_out_and_the_window_holds_the_last_steps() -> None:
    parts = minibatches(2)
    metrics = LengthDiagnostics().update(parts)
    assert metrics["fspo/first_minibatch_z_rms"] == 0
    assert metrics["fspo/sequences"] == 3 * 96
    assert metrics["fspo/accept_rate"] < 0.9, "the accepted sequences of mini-batch 0 would raise it"
    assert list(LengthDiagnostics().update(parts.unmoved())) == ["fspo/first_minibatch_z_rms"]
    diagnostics, fresh = LengthDiagnostics(window=2), LengthDiagnostics(window=2)
    last = [diagnostics.update(minibatches(step)) for step in range(3)][-1]
    assert last == [fresh.update(minibatches(step)) for step in (1, 2)][-1]


def test_where_nothing_was_or_could_be_clipped_nothing_is_said() -> None:
    still, moved, flat = (sequences(1, scale=scale) for scale in (0.0, 1e-4, 0.1))
    flat = dataclasses.replace(flat, advantage_B=0 * flat.advantage_B)
    for output, rate in ((moved, 0.0), (still, None), (flat, None)):
        metrics = LengthDiagnostics().update(responses_of(output, first_number=1))
        assert metrics.get("fspo/clip_frac") == metrics.get("fspo/clip_high_frac") == rate
        assert ("fspo/accept_rate" in metrics) == (rate is not None)
        assert metrics["fspo/sequences"] == 96 and "fspo/z_std" in metrics
        assert output is flat or not [name for name in metrics if name.startswith("fspo/lre")]
    clipped = dataclasses.replace(sequences(1), accepted_B=torch.zeros(96, dtype=torch.bool))
    metrics = LengthDiagnostics().update(responses_of(clipped, first_number=1))
    assert metrics["fspo/clip_frac"] == 1 and "fspo/lre_debiased" not in metrics, "nothing accepted has no LRE"
    assert LengthDiagnostics().update(Responses.join([])) == {}


def test_everything_by_length_is_of_eighths_of_the_window() -> None:
    parts = minibatches(3)
    metrics, moved = LengthDiagnostics().update(parts), parts.moved()
    bins = [moved.select(moved.bin_B == j) for j in range(8)]
    assert min(map(len, bins)) > 0 and sum(map(len, bins)) == 3 * 96
    for j, part in enumerate(bins):
        expected = {"accept": part.inside_B.mean(), "length": part.length_B.mean(), "z_std": part.z_B.std()}
        assert {name: metrics[f"fspo/{name}/bin_{j:02d}"] for name in expected} == pytest.approx(expected)
    for view, name in ((moved.inside_B, "lre_debiased"), (moved.kept_B, "lre_active_debiased")):
        cells = [np.bincount(moved.batch_B * 8 + moved.bin_B, x, 24).reshape(3, 8) for x in (view, np.ones(len(moved)))]
        assert metrics[f"fspo/{name}"] == pytest.approx(length_reweighting_error(*cells).debiased.value)


def test_outcome_by_length() -> None:
    diagnostics = LengthDiagnostics()
    assert diagnostics.outcome_metrics("acc", torch.ones(2), torch.tensor([3, 0])) == {"fspo/outcome/acc/bin_00": 1.0}
    diagnostics.update(minibatches(4))
    length_B = torch.tensor([1, 2, 119, 120, 0])
    metrics = diagnostics.outcome_metrics("acc", torch.tensor([1.0, 0.0, 1.0, 1.0, 9.0]), length_B)
    assert metrics == {"fspo/outcome/acc/bin_00": 0.5, "fspo/outcome/acc/bin_07": 1.0}


def test_the_noise_is_by_length_and_its_margin_is_warned_of() -> None:
    lengths, of_rounding = (16, 64, 256), [0.001, 0.005, 0.0, 0.01]
    length_B, root_J = torch.tensor(lengths).repeat_interleave(500), np.sqrt(lengths)
    floor, near, nothing, within = (noise_floor(normal(length_B, sigma), FSPO) for sigma in of_rounding)
    assert floor.length_J.tolist() == list(lengths)
    np.testing.assert_allclose(floor.rms_J, 0.001 * root_J, rtol=0.1)
    np.testing.assert_allclose(floor.half_width_J, 0.03 * root_J, rtol=1e-6)
    assert floor.margin == pytest.approx(30, rel=0.1) and floor.warning() is None
    assert set(floor.metrics()) == {*(f"fspo/noise_floor/S_rms/bin_0{j}" for j in range(3)), "fspo/noise_floor/margin"}
    assert near.warning() is None and nothing.margin == math.inf
    warning = within.warning()  # a band within five times the noise
    assert warning and "fspo/noise_floor/margin" in warning and "same packs" in warning and "fp16" in warning


def test_a_drift_of_a_third_of_the_band_is_said_with_the_remedy() -> None:
    def line(drift: float, loss: str = "fspo", state: BandState | None = None, count: int = 4000) -> str | None:
        diagnostics = LengthDiagnostics()
        length_B = torch.randint(1, 2000, (count,), generator=torch.Generator().manual_seed(0))
        diagnostics.update(normal(length_B, 0.02, drift))
        return diagnostics.drift_warning(ALGORITHMS[loss], state)

    # At 1,870 tokens, the mean length of the longest eighth, a third of 0.03 sqrt(L) is 0.43.
    far = line(0.5 / 1870)
    assert far is not None and "fspo_v1" in far and "near 18" in far and "-0.5" in far
    assert line(0.35 / 1870) is None
    assert line(0.5 / 1870, state=BandState(clip_scale=2.0)) is None, "a wider band"
    assert line(0.5 / 1870, count=64) is None, "too few to tell"
    assert line(0.5 / 1870, "fspo_v1", BandState(drift_per_token=1e-4)) is None
    assert LengthDiagnostics().drift_warning(FSPO) is None
