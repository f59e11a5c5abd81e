"""Promises 1 and 2: the losses are what the page says, and none changes unnoticed."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from formulas import F64, batch, formula
from hypothesis import given, settings
from hypothesis import strategies as st
from library import (
    ALGORITHMS,
    NAMES,
    BandState,
    SequenceLossOutput,
    SequenceLossSettings,
    UnusableRowsError,
    acceptance_band,
    c_of_eps,
    eps_of_c,
    resolve_settings,
    sequence_policy_loss,
)
from messages import holds

pytestmark = pytest.mark.promise(1, 2)
DRIFT = 2e-3
STATE = BandState(drift_per_token=DRIFT)

any_loss = st.one_of(
    st.sampled_from(NAMES).map(ALGORITHMS.__getitem__),
    st.builds(
        SequenceLossSettings,
        exponent=st.sampled_from([0.0, 0.43, 0.5, 1.0]) | st.floats(0, 2),
        c_low=st.floats(0, 0.5),
        c_high=st.floats(0, 0.5),
        drift=st.sampled_from(["none", "kl"]),
        weight=st.sampled_from(["sequence", "length_normalised"]),
        grad_scale=st.sampled_from(["1", "1/L"]),
        grad_multiplier=st.floats(0.1, 100),
    ),
)


@given(
    any_loss,
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1e-4, 0.01, 0.1, 0.5]),
    st.sampled_from([0.0, 7.0, math.nan, math.inf, -math.inf]),
    st.lists(st.floats(0.1, 3), min_size=6, max_size=6),
)
@settings(max_examples=120)
def test_any_member_equals_the_formula_whatever_padding_holds(
    loss: SequenceLossSettings, seed: int, scale: float, junk: float, rollout_weights: list[float]
) -> None:
    """Each response has its own rollout weight."""
    *tensors, mask = batch(seed, rows=6, width=12, scale=scale)
    log_prob, old, advantages = (tensor.masked_fill(~mask, junk) for tensor in tensors)
    advantages = advantages.round().masked_fill(~mask, junk)  # some are 0
    weight_B = torch.tensor(rollout_weights, dtype=F64)
    weights = weight_B[:, None].expand_as(old).masked_fill(~mask, junk)
    inputs = (log_prob.requires_grad_(), old, advantages, mask)
    output = sequence_policy_loss(*inputs, loss, STATE, weights)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
    expected = formula(inputs, loss, DRIFT, weight_B)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), log_prob)
    torch.testing.assert_close(output.loss_B, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient.masked_fill(~mask, 0.0), rtol=1e-10, atol=1e-12)


def one_response(S: float, A: float, loss: SequenceLossSettings, length: int = 4) -> tuple[SequenceLossOutput, float]:
    """The output, and the gradient to each of its log-probabilities."""
    log_prob = torch.full((1, length), S / length, dtype=F64, requires_grad=True)
    old, mask = torch.zeros(1, length, dtype=F64), torch.ones(1, length, dtype=torch.bool)
    output = sequence_policy_loss(log_prob, old, torch.full_like(old, A), mask, loss)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
    assert bool((gradient == gradient[0, 0]).all())
    return output, float(gradient[0, 0])


@pytest.mark.parametrize("A", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("S", [0.5, -0.5, 0.5 + 1e-9, -0.5 - 1e-9, 0.5 - 1e-9, -0.5 + 1e-9])
def test_both_ends_of_the_band_belong_to_it(S: float, A: float) -> None:
    loss = SequenceLossSettings(exponent=0.5, c_low=0.25, c_high=0.25)  # 0.5 at a length of 4
    output, slope = one_response(S, A, loss)
    above, below = S > 0.5, S < -0.5
    assert bool(output.accepted_B) == (not above and not below)
    assert (bool(output.clipped_high_B), bool(output.clipped_low_B)) == (above and A > 0, below and A < 0)
    removed = (above and A > 0) or (below and A < 0)
    assert slope == pytest.approx(0.0 if removed else -A * math.exp(S), rel=1e-12, abs=0)


@pytest.mark.parametrize("tiny", [1e-13, 1e-9, 1e-5])
def test_a_band_of_no_width_removes_the_smallest_movement(tiny: float) -> None:
    none = SequenceLossSettings(c_low=0.0, c_high=0.0)
    assert one_response(0.0, 1.0, none)[1] == -1 and one_response(0.0, -1.0, none)[1] == 1
    assert one_response(tiny, 1.0, none)[1] == 0 and one_response(-tiny, -1.0, none)[1] == 0
    assert one_response(-tiny, 1.0, none)[1] == pytest.approx(-1, rel=1e-4)
    assert one_response(tiny, -1.0, none)[1] == pytest.approx(1, rel=1e-4)
    sides = SequenceLossSettings(c_low=0.0, c_high=tiny)
    assert not bool(one_response(-tiny, 1.0, sides)[0].accepted_B) and bool(
        one_response(tiny, 1.0, sides)[0].accepted_B
    )


@pytest.mark.parametrize("S", [6.0, 1e4])
@pytest.mark.parametrize(("weight", "n"), [("sequence", 1), ("length_normalised", 4)])
def test_beyond_the_guard_the_weight_is_constant(S: float, weight: str, n: int) -> None:
    loss = SequenceLossSettings(c_low=9e4, c_high=9e4, weight=weight, s_max=5.0)  # type: ignore[arg-type]
    output, slope = one_response(n * S, -2.0, loss)
    assert slope == pytest.approx(2 * math.exp(5)) and bool(output.overflow_B)
    assert float(output.weight_B) == pytest.approx(math.exp(5))
    assert not bool(one_response(n * 4.9, -2.0, loss)[0].overflow_B)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 0), (257, 3), (2, 1025), (3, 20_001)])
def test_no_size_of_a_batch_changes_the_loss(rows: int, width: int) -> None:
    inputs = batch(seed=7, rows=rows, width=width, scale=0.02)
    inputs[0].requires_grad_()
    output = sequence_policy_loss(*inputs, ALGORITHMS["fspo"])
    torch.testing.assert_close(
        output.loss_B, formula(inputs, ALGORITHMS["fspo"], 0.0, torch.ones(rows, dtype=F64)), rtol=1e-10, atol=1e-12
    )
    assert output.length_B.tolist() == inputs[3].sum(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    log_prob, old, advantages, mask = batch(rows=16, width=3000, scale=0.2, dtype=dtype)
    S = ((log_prob.double() - old.double()) * mask).sum(-1)
    output = sequence_policy_loss(log_prob, old, advantages, mask, ALGORITHMS["fspo"])
    assert output.loss_B.dtype == torch.float32
    torch.testing.assert_close(output.log_ratio_B.double(), S, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_a_batch_has_the_loss_that_it_has_in_all(name: str) -> None:
    """Micro-batches and ranks change nothing."""
    inputs = batch(seed=3)
    whole = sequence_policy_loss(*inputs, ALGORITHMS[name], STATE)
    removed = whole.clipped_high_B | whole.clipped_low_B
    assert whole.clipped_high_B.any() and whole.clipped_low_B.any() and (whole.valid_B & ~removed).any()
    for part in (slice(0, 1), slice(1, 40), slice(40, 64)):
        some = sequence_policy_loss(*(tensor[part] for tensor in inputs), ALGORITHMS[name], STATE)
        for field in dataclasses.fields(whole):
            assert torch.equal(getattr(some, field.name), getattr(whole, field.name)[part]), field.name


@pytest.mark.parametrize("row", [0, 5, 63])
@pytest.mark.parametrize(
    ("tensor", "value"),
    [(0, math.nan), (0, math.inf), (1, -math.inf), (1, math.nan), (2, math.nan), (2, 7.0), (4, 7.0), (4, math.nan)],
)
def test_a_row_without_a_loss_is_refused_by_its_number(row: int, tensor: int, value: float) -> None:
    log_prob, old, advantages, _ = batch()
    mask = torch.ones_like(old, dtype=torch.bool)
    advantages = torch.ones_like(old)
    inputs = [log_prob, old, advantages, mask, torch.ones_like(old)]
    *tensors, weights = inputs
    assert sequence_policy_loss(*tensors, ALGORITHMS["fspo"], None, weights).loss_B.isfinite().all()
    inputs[tensor] = inputs[tensor].clone()
    inputs[tensor][row, 17] = value
    *tensors, weights = inputs
    name = ("log_prob", "old_log_prob", "advantages", "mask", "rollout_is_weights")[tensor]
    with pytest.raises(UnusableRowsError, match=rf"row {row} .*: {name}_BT is {value:g} at response token 17 "):
        sequence_policy_loss(*tensors, ALGORITHMS["fspo"], None, weights)


def test_a_sum_that_overflows_and_other_shapes_are_refused_too() -> None:
    with pytest.raises(UnusableRowsError, match=r"row 0 .*overflows"):
        sequence_policy_loss(torch.full((1, 2), -3e38), *torch.ones(3, 1, 2), ALGORITHMS["fspo"])
    log_prob, old, advantages, mask = batch()
    for wrong, shape in ((advantages[:, 0], "(64,)"), (advantages[:, 1:], "(64, 49)")):
        with pytest.raises(ValueError, match=holds("advantages_BT", shape, "(64, 50)", "expand_as", "slice")):
            sequence_policy_loss(log_prob, old, wrong, mask, ALGORITHMS["fspo"])
    with pytest.raises(ValueError, match=holds("log_prob_BT", "(50,)", "from_packed")):
        sequence_policy_loss(log_prob[0], old[0], advantages[0], mask[0], ALGORITHMS["fspo"])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_learn_from_is_zero_loss_and_zero_gradient(shape: tuple[int, int], name: str) -> None:
    log_prob, nothing = torch.full(shape, math.nan, requires_grad=True), torch.zeros(shape, dtype=torch.bool)
    output = sequence_policy_loss(log_prob, *[log_prob.detach()] * 2, nothing, ALGORITHMS[name], STATE)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
    assert torch.equal(gradient, torch.zeros(shape)) and torch.equal(output.loss_B, torch.zeros(shape[0]))
    assert not bool((output.valid_B | output.accepted_B | output.overflow_B).any())


@pytest.mark.parametrize("settings_", [ALGORITHMS["fspo_v1"], SequenceLossSettings(drift="kl")])
def test_a_drift_that_nobody_measured_is_refused(settings_: SequenceLossSettings) -> None:
    with pytest.raises(ValueError, match="drift"):
        acceptance_band(torch.tensor([100]), settings_)
    with pytest.raises(ValueError, match="drift"):
        sequence_policy_loss(*batch(), settings_)
    lower, upper = acceptance_band(torch.tensor([100]), settings_, BandState(), F64)
    assert (float(lower), float(upper)) == pytest.approx((-0.3, 0.3)), "before any data there is none"


def test_the_drift_is_that_of_the_mini_batch() -> None:
    state = BandState(drift_by_mini_batch=(0.0, 0.01, 0.03))
    drifts = [state.at_mini_batch(index).drift_per_token for index in range(5)]
    assert drifts == [0.0, 0.01, 0.03, 0.03, 0.03]
    lower, upper = acceptance_band(torch.tensor([100]), ALGORITHMS["fspo_v1"], state.at_mini_batch(2), F64)
    assert (float(lower), float(upper)) == pytest.approx((-3.3, -2.7))


@pytest.mark.parametrize("scale", [0.5, 3.0, math.inf])
def test_one_factor_scales_both_clip_values(scale: float) -> None:
    loss = SequenceLossSettings(exponent=1.0, c_low=0.1, c_high=0.2)
    lower, upper = acceptance_band(torch.tensor([10]), loss, BandState().scaled(scale), F64)
    assert (float(lower), float(upper)) == pytest.approx((-1.0 * scale, 2.0 * scale))


#: exponent, c_low, c_high, weight, scale of the gradient, as published.
PUBLISHED = {
    "fspo": (0.5, 0.03, 0.03, "sequence", "1"),
    "fspo_v1": (0.5, 0.03, 0.03, "sequence", "1"),
    "seq_rloo": (0.0, -math.log(0.8), math.log(1.2), "sequence", "1"),
    "seq_gspo": (1.0, -math.log(1 - 3e-4), math.log(1 + 4e-4), "length_normalised", "1/L"),
    "luspo": (1.0, -math.log(1 - 3e-4), math.log(1 + 4e-4), "length_normalised", "1"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_named_loss_has_its_published_settings(name: str) -> None:
    loss = ALGORITHMS[name]
    exponent, c_low, c_high, weight, grad_scale = PUBLISHED[name]
    assert (loss.exponent, loss.weight, loss.grad_scale) == (exponent, weight, grad_scale)
    assert (loss.c_low, loss.c_high) == pytest.approx((c_low, c_high), rel=1e-12)
    assert (loss.drift, loss.grad_multiplier, loss.s_max) == ("kl" if name == "fspo_v1" else "none", 1.0, 10.0)


def test_settings_beside_a_name_replace_one_each() -> None:
    given = resolve_settings({"loss_mode": "seq_gspo", "c_low": 0.5, "c_high": None, "of_nobody": 3})
    assert given == dataclasses.replace(ALGORITHMS["seq_gspo"], c_low=0.5)
    assert resolve_settings({"loss_mode": "vanilla"}) is None
    wrong = {"c_low": -1, "c_high": math.inf, "exponent": 2.1, "grad_multiplier": 0, "s_max": 81, "weight": "x"}
    for key, value in wrong.items():
        with pytest.raises(ValueError, match=key):
            resolve_settings({"loss_mode": "fspo", key: value})


@pytest.mark.parametrize("eps", [(0.2, 0.2), (3e-4, 4e-4), (0.0, 0.0), (0.999, 9.0), (1e-12, 1e-12)])
def test_bounds_on_a_ratio_are_nats_and_back(eps: tuple[float, float]) -> None:
    c_low, c_high = c_of_eps(*eps)
    assert (math.exp(-c_low), math.exp(c_high)) == pytest.approx((1 - eps[0], 1 + eps[1]), rel=1e-12)
    assert eps_of_c(c_low, c_high) == pytest.approx(eps, rel=1e-12)
    for wrong in ((1.0, 0.1), (-0.1, 0.1), (0.1, math.inf), (0.1, -0.1)):
        with pytest.raises(ValueError):
            c_of_eps(*wrong)
