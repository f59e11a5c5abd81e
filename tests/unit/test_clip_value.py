"""Clip values: the share inside, its interval, and when a run sets, fixes and questions its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from batches import random_batch
from messages import unpadded

from fspo.audit.expected import expected, shares_outside
from fspo.clip_value import needed_scale, scale_for, scale_with_interval, scaled
from fspo.kept import clipped_cosine
from fspo.losses import ALGORITHMS, BANDS, sequence_policy_loss
from fspo.measured import FIXED_AFTER, ClipMeasurement, DriftMeasurement
from fspo.responses import Responses
from fspo.types import BandState, SequenceLossSettings

FSPO = ALGORITHMS["fspo"]


def responses(groups: int, seed: int = 0, sigma: float = 0.04) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """S, L and group of eight responses to each prompt: S spreads like sigma sqrt(L), half of it with the prompt."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), 8)
    length = rng.integers(1, 400, group.size)
    s = sigma * np.sqrt(length / 2) * (rng.standard_normal(groups)[group] + rng.standard_normal(group.size))
    return s, length, group


def test_the_interval_is_that_of_groups_not_of_responses() -> None:
    """With eight copies of one response a group, 60 groups know no more than 60 responses do."""
    s, length, group = responses(60)
    needed = needed_scale(s, length, FSPO)[::8]
    copies, once = scale_with_interval(np.repeat(needed, 8), group), scale_with_interval(needed, group[::8])
    assert copies.high - copies.low == pytest.approx(once.high - once.low, rel=0.1)
    assert copies.high / copies.low > 1.4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_cosine_is_that_of_orthogonal_gradients(name: str) -> None:
    """Each log-probability is a parameter of its own, so that the gradient of a response has a squared norm of L."""
    loss, state = ALGORITHMS[name], BandState(drift_per_token=1e-3)
    inputs = random_batch(300, 40, scale=0.05 if loss.exponent < 1 else 0.002)
    wide = dataclasses.replace(loss, c_low=1e9, c_high=1e9)
    outputs = [sequence_policy_loss(inputs[0].requires_grad_(), *inputs[1:], one, state) for one in (loss, wide)]
    gradients = [torch.autograd.grad(out.loss_B.sum(), inputs[0])[0].flatten() for out in outputs]
    cosine = float(torch.nn.functional.cosine_similarity(*gradients, dim=0))
    assert 0.3 < cosine < 0.97
    out, some = outputs[0], outputs[0].valid_B
    tensors = (~(out.clipped_high_B | out.clipped_low_B), out.advantage_B, out.weight_B, out.length_B)
    columns = [column_B.detach()[some].double().numpy() for column_B in tensors]
    assert clipped_cosine(*columns, loss.grad_scale) == pytest.approx(cosine, rel=1e-9)


@pytest.mark.parametrize("sigma", [0.04, 0.4, 1e-6])
def test_a_value_has_an_interval_and_is_questioned_once(sigma: float) -> None:
    measurement = ClipMeasurement(FSPO, 0.85)
    for step in range(1, FIXED_AFTER + 1):
        line = measurement.add(needed_scale(*responses(100, seed=step)[:2], FSPO), step)
        assert (line is not None) == (step in (1, FIXED_AFTER))
    assert "c_low_interval" not in measurement.values[0], "one rollout batch says nothing of others"
    value, line = measurement.values[-1], measurement.sentence()
    low, high = value["c_high_interval"]
    assert low < value["c_high"] < high
    assert f"c = {value['c_high']:.3g} [{low:.3g}, " in line and f"step {FIXED_AFTER + 1} on" in line and "85%" in line
    last, needed = measurement.scale, needed_scale(*responses(100, seed=99, sigma=sigma)[:2], FSPO)
    lines = {step: line for step in range(11, 41) if (line := measurement.add(needed, step)) is not None}
    assert list(lines) == [20] * (sigma != 0.04), "a value that fits is not questioned"
    fits = f"c_high={scaled(FSPO, scale_for(needed, 0.85)).c_high:.3g}"
    assert all("warning" in line and fits in line for line in lines.values())
    assert measurement.scale == last, "a policy that moves farther is clipped more"


def test_what_says_nothing_measures_nothing() -> None:
    """Responses before a moved weight, a clip value of 0, no response, and a policy that grew likelier."""
    measurement = ClipMeasurement(FSPO, 0.85)
    assert measurement.add(np.zeros(50), 2) is None and measurement.values == []
    with pytest.raises(ValueError, match=r"c_low=0\.0"):
        needed_scale(np.ones(1), np.ones(1), SequenceLossSettings(c_low=0.0))
    with pytest.raises(ValueError, match=r"needed_B.*record responses"):
        scale_for(np.zeros(0))
    state = DriftMeasurement().update(Responses.of_rows({"S": np.ones(5), "L": np.ones(5)}))
    assert set(state.drift_by_mini_batch) == {0.0}


@pytest.mark.parametrize("band", BANDS)
def test_a_removed_share_is_solved_for_the_sigma_that_gives_it(band: str) -> None:
    """Against draws of S: two digits of sigma are printed, and two thirds of the mini-batches count."""
    text = unpadded(expected(["removed=0.12", "minibatches=3", "lengths=[900]"]))
    sigma = float(next(line for line in text.splitlines() if line.startswith(f"| {band} |")).split("|")[-2])
    settings, length = ALGORITHMS[BANDS[band]], np.full(200_000, 900.0)
    s_B = np.random.default_rng(0).normal(-900 * sigma**2 / 2, 30 * sigma, len(length))
    outside = (needed_scale(s_B, length, settings) > 1).mean()
    assert outside / 2 * 2 / 3 == pytest.approx(0.12, rel=0.07)
    assert shares_outside(sigma, [900], settings)[0] == pytest.approx(outside, abs=0.006)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["removed=0.1", "minibatches=1", "lengths=[9]"], "minibatches=1"),
        (["sigma=0.1", "minibatches=2", "lengths=[9]"], "minibatches=2: .*removed="),
        (["removed=0.1", "sigma=0.8", "lengths=[9]"], "one of sigma= and removed="),
        (["removed=0.63", "minibatches=2", "lengths=[256]"], "removed=0.63: .*at most 25.0%.*S follows A.*audit"),
    ],
)
def test_what_cannot_be_solved_is_said(words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        expected(words)
