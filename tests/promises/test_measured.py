"""Promise 4: what a run measures of itself."""

from __future__ import annotations

import copy
import dataclasses
import math

import inside
import numpy as np
import pytest
from inside import MiniBatch
from library import ALGORITHMS, NAMES, ClipMeasurement, DriftMeasurement, Responses, needed_scale, scale_for

pytestmark = pytest.mark.promise(4)


def needed(step: int, scale: float = 1.0, count: int = 96) -> np.ndarray:
    """Factors that the responses of a rollout batch need."""
    return scale * np.abs(np.random.default_rng(step).standard_normal(count)) * (1 + step % 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_factor_is_the_smallest_that_takes_a_response_in(name: str) -> None:
    loss, draw, drift = ALGORITHMS[name], np.random.default_rng(1), 2e-4
    length = draw.integers(1, 5000, 500)
    s = draw.standard_normal(500) * loss.c_high * length**loss.exponent
    factor = needed_scale(s, length, loss, drift)
    s = s + drift * length if name == "fspo_v1" else s  # about the centre of the band
    edges = [sign * c * length**loss.exponent for sign, c in ((-1, loss.c_low), (1, loss.c_high))]
    expected = np.where(s > 0, s / edges[1], s / edges[0])
    np.testing.assert_allclose(factor, expected, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 20, 97, 1000])
@pytest.mark.parametrize("accept", [0.05, 0.5, 0.85, 0.99])
def test_the_wanted_share_lies_inside_and_no_smaller_factor_does(count: int, accept: float) -> None:
    factors = needed(count, count=count)
    scale = scale_for(factors, accept)
    assert (factors <= scale).mean() >= accept - 1e-9
    assert (factors < scale).mean() < accept


def test_clip_values_are_the_last_five_batches_and_then_fixed() -> None:
    measurement = ClipMeasurement(ALGORITHMS["fspo"], 0.85)
    assert measurement.scale == math.inf, "no clip at first"
    for step in range(1, 16):
        measurement.add(np.zeros(0), 100 + step)  # a batch without a response counts for nothing
        measurement.add(needed(step), step)
        last = min(step, 10)
        expected = scale_for(np.concatenate([needed(i) for i in range(max(1, last - 4), last + 1)]), 0.85)
        assert measurement.scale == expected, step
        assert [value["after_step"] for value in measurement.values] == list(range(1, last + 1))
        assert measurement.values[-1]["c_low"] == measurement.values[-1]["c_high"] == pytest.approx(0.03 * expected)


def said(measurement: ClipMeasurement, first: int, last: int) -> list[str | None]:
    """What is said at each step; from step 16 on the policy moves otherwise than when the values were measured."""
    return [measurement.add(needed(step, 5.0 if step > 15 else 1.0), step) for step in range(first, last + 1)]


@pytest.mark.parametrize("kill", [1, 4, 5, 9, 10, 11, 16, 20, 24, 27])
def test_a_resume_measures_and_warns_as_if_not_stopped(kill: int) -> None:
    whole, before = ClipMeasurement(ALGORITHMS["fspo"], 0.85), ClipMeasurement(ALGORITHMS["fspo"], 0.85)
    lines = said(whole, 1, 30)
    assert sum(line is not None for line in lines) == 3, "first set, fixed, far off once"
    first = said(before, 1, kill)
    state, resumed = copy.deepcopy(before.state_dict()), ClipMeasurement(ALGORITHMS["fspo"], 0.85)
    said(before, kill + 1, kill + 3)  # what was lost in the kill
    resumed.load_state_dict(state)
    assert first + said(resumed, kill + 1, 30) == lines
    assert (resumed.values, resumed.scale) == (whole.values, whole.scale)
    with pytest.raises(ValueError):
        ClipMeasurement(ALGORITHMS["seq_gspo"], 0.85).load_state_dict(state)
    with pytest.raises(ValueError):
        ClipMeasurement(ALGORITHMS["fspo"], 0.8).load_state_dict(state)


def rollout_batch(step: int, mini_batches: int = 3, rows: int = 40) -> Responses:
    """S drifts farther down with each mini-batch, and in the first not at all."""
    draw, update = np.random.default_rng(step), np.repeat(np.arange(mini_batches), rows)
    length = draw.integers(1, 300, len(update))
    s = -0.001 * step * update * length + 0.01 * np.sqrt(length) * draw.standard_normal(len(update)) * (update > 0)
    columns = {"S": s, "L": length, "A": np.ones(len(s)), "step": np.full(len(s), step)}
    return Responses.of_rows(columns | {"update": update, "minibatch": update})


def drift_of(batches: list[Responses]) -> list[float]:
    """By position of the mini-batch: minus sum of S over sum of L, at least 0."""
    s, length, update = (
        np.concatenate([getattr(b, name) for b in batches]) for name in ("s_B", "length_B", "update_B")
    )
    return [max(0.0, -s[update == u].sum() / length[update == u].sum()) for u in np.unique(update)]


def test_the_drift_is_that_of_the_last_eight_batches_before() -> None:
    measurement, batches = DriftMeasurement(), [rollout_batch(step) for step in range(1, 13)]
    assert measurement.state.at_mini_batch(1).drift_per_token == 0
    for number, batch in enumerate(batches, 1):
        state = measurement.update(batch)
        expected = drift_of(batches[max(0, number - 8) : number])
        assert [state.at_mini_batch(i).drift_per_token for i in range(3)] == pytest.approx(expected, rel=1e-9)
    assert expected[0] == 0 < expected[1] < expected[2]


@pytest.mark.parametrize("kill", [1, 7, 8, 9])
def test_a_resume_has_the_drift_of_before(kill: int) -> None:
    whole, before = DriftMeasurement(), DriftMeasurement()
    states = [whole.update(rollout_batch(step)) for step in range(1, 13)]
    for step in range(1, kill + 1):
        before.update(rollout_batch(step))
    resumed = DriftMeasurement()
    resumed.load_state_dict(copy.deepcopy(before.state_dict()))
    assert resumed.state == states[kill - 1]
    assert [resumed.update(rollout_batch(step)) for step in range(kill + 1, 13)] == states[kill:]


PROMPTS, LR = 96, 1e-4


def mini_batches(step: int, count: int = 4, lr: float = LR, still: int = 0) -> list[MiniBatch]:
    """A rollout batch: S is 0 until a weight has moved; ``still`` mini-batches have a gradient of 0."""
    draw = np.random.default_rng(step)
    length, rows = draw.integers(4, 200, PROMPTS), np.arange(PROMPTS)
    s = 0.06 * np.sqrt(length) * draw.standard_normal(PROMPTS)
    a = draw.choice([-1.0, 0.0, 1.0], PROMPTS)
    parts = []
    for number, mine in enumerate(np.split(rows, count)):
        moved = number > still
        columns = {"S": s[mine] * (1.0 if moved else 1e-5), "L": length[mine], "A": a[mine], "row": mine}
        parts.append(MiniBatch(columns, grad_norm=0.0 if number < still else 1.0, learning_rate=lr))
    return parts


def expected_scale(steps: list[list[MiniBatch]], first: int = 1) -> float:
    """Of the responses with a gradient in mini-batches from the number ``first`` on."""
    parts = [part.rows for step in steps for part in step[first:]]
    factors = [needed_scale(rows["S"], rows["L"], ALGORITHMS["fspo"])[rows["A"] != 0] for rows in parts]
    return scale_for(np.concatenate(factors), 0.85)


def test_only_responses_after_a_moved_weight_are_measured() -> None:
    steps = [mini_batches(step) for step in range(1, 4)]
    values, scale = inside.clip_values(steps, LR)
    assert scale == pytest.approx(expected_scale(steps), rel=1e-6)
    with_gradient = sum(int((part.rows["A"] != 0).sum()) for step in steps for part in step[1:])
    assert values[-1]["responses"] == with_gradient


def test_a_weight_that_no_gradient_moved_has_not_moved() -> None:
    """All rewards are equal at first: weight decay alone moves the weights, and S is tiny."""
    steps = [mini_batches(1, still=2), mini_batches(2)]
    _, scale = inside.clip_values(steps[:1], LR)
    assert scale == pytest.approx(expected_scale(steps[:1], first=3), rel=1e-6)
    assert inside.clip_values([mini_batches(1, still=4)], LR) == ([], math.inf)


def test_nothing_is_measured_while_the_learning_rate_warms_up() -> None:
    warm_up = [mini_batches(step, lr=LR * step / 4) for step in (1, 2, 3)]
    assert inside.clip_values(warm_up, LR) == ([], math.inf)
    steps = [mini_batches(step) for step in (4, 5)]
    assert inside.clip_values(warm_up + steps, LR)[1] == pytest.approx(expected_scale(steps), rel=1e-6)


def test_a_batch_in_which_the_rate_becomes_full_does_not_count() -> None:
    """Its first update was a smaller one."""
    first, second = mini_batches(1), mini_batches(2)
    mixed = [dataclasses.replace(first[0], learning_rate=LR / 2), *first[1:]]
    assert inside.clip_values([mixed], LR) == ([], math.inf)
    assert inside.clip_values([mixed, second], LR)[1] == pytest.approx(expected_scale([second]), rel=1e-6)


def test_one_update_a_rollout_batch_has_the_published_values() -> None:
    assert inside.clip_values([mini_batches(step, count=1) for step in (1, 2)], LR) == ([], 1.0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_change_no_clip_value(ranks: int) -> None:
    steps = [mini_batches(step) for step in range(1, 13)]
    assert inside.clip_values(steps, LR, ranks=ranks) == inside.clip_values(steps, LR)


@pytest.mark.parametrize("kills", [(1,), (3, 7), (9, 10, 11)])
def test_a_resumed_run_has_the_clip_values_of_one_not_stopped(kills: tuple[int, ...]) -> None:
    warm_up = [mini_batches(step, lr=LR / 2) for step in (1, 2)]
    steps = warm_up + [mini_batches(step) for step in range(3, 16)]
    whole = inside.clip_values(steps, LR)
    assert len(whole[0]) == 10
    assert inside.clip_values(steps, LR, kills=kills) == whole


def test_the_loss_is_divided_by_the_first_batch_and_no_other() -> None:
    lengths = [np.array([10, 30, 80]), np.array([100, 200, 300])]
    assert inside.divisors(lengths) == pytest.approx([40, 40])
    assert inside.divisors(lengths, kills=(1,)) == pytest.approx([40, 40])
    parts = [np.array([10, 20]), np.array([60]), np.array([70, 40])]
    assert inside.divisors(parts, of_one_batch=True) == pytest.approx([15, 30, 40]), "by the responses so far"
