"""The loss against references written straight from the formulas, and its behaviour on bad input."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import holds

from fspo.check_loss.call import synthetic_batch
from fspo.length_bins import FINE_BINS, FINE_LENGTH_EDGES, length_bin
from fspo.losses import ALGORITHMS, UnusableRowsError, acceptance_band, sequence_log_ratio, sequence_policy_loss
from fspo.types import BandState, SequenceLossOutput, SequenceLossSettings

F64 = torch.float64
K = FINE_BINS
STATE = BandState(drift_per_token=2e-3, half_width_K=tuple(np.linspace(0.02, 0.08, K)))

VARIANTS: dict[str, SequenceLossSettings] = {
    **ALGORITHMS,
    "fspo v1 asymmetric": SequenceLossSettings(c_low=0.02, c_high=0.03, drift="kl"),
    "fspo, L^0.43": SequenceLossSettings(exponent=0.43, c_low=0.03, c_high=0.04),
    "fspo 1/L": SequenceLossSettings(grad_scale="1/L", grad_multiplier=40.0),
    "gspo band, exp S": dataclasses.replace(ALGORITHMS["seq_gspo"], weight="sequence"),
}

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def band(length: int, loss: SequenceLossSettings, state: BandState | None = None) -> tuple[float, float]:
    lower, upper = acceptance_band(torch.tensor([length]), loss, state, F64)
    return float(lower), float(upper)


def test_the_quantile_band_is_the_sqrt_band_until_it_is_measured() -> None:
    widths = tuple(0.01 + 1e-4 * k for k in range(K))
    measured = BandState(half_width_K=widths)
    loss = SequenceLossSettings(band="quantile", c_low=0.01, c_high=0.02, target_acceptance=0.85)
    assert band(100, loss, BandState()) == pytest.approx((-0.1, 0.2))
    half = widths[int(length_bin([100])[0])] * 10
    assert band(100, loss, measured) == pytest.approx((-half, half))
    lengths = torch.tensor([1, 2, 16, 17, 100, 131_071, 131_072, 10**7])
    _, upper = acceptance_band(lengths, ALGORITHMS["fspo_quantile"], measured, F64)
    torch.testing.assert_close(upper, torch.tensor(widths, dtype=F64)[length_bin(lengths)] * lengths.double().sqrt())


@pytest.mark.parametrize("name", sorted(name for name in VARIANTS if VARIANTS[name].needs_state))
def test_without_a_state_a_measured_band_is_refused(name: str) -> None:
    loss = VARIANTS[name]
    said = holds(f"band='{loss.band}'", f"drift='{loss.drift}'", "BandController", "BandState()", "fspo")
    with pytest.raises(ValueError, match=said):
        acceptance_band(torch.tensor([100]), loss)
    with pytest.raises(ValueError, match=said):
        sequence_policy_loss(*batch(), loss)


def batch(seed: int = 0, sequences: int = 64, width: int = 50, scale: float = 0.06, dtype: torch.dtype = F64) -> Inputs:
    """Log-probs of lengths 0 to ``width``, with masked holes, on both sides of every band."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(sequences, width, generator=generator, dtype=F64)
    log_prob = old + scale * torch.randn(sequences, width, generator=generator, dtype=F64)
    log_prob = log_prob + scale * torch.randn(sequences, 1, generator=generator, dtype=F64) / width**0.5
    length = torch.randint(0, width + 1, (sequences, 1), generator=generator)
    mask = (torch.arange(width) < length) & (torch.rand(sequences, width, generator=generator) < 0.9)
    advantages = torch.randn(sequences, 1, generator=generator, dtype=F64) * mask
    return log_prob.to(dtype).requires_grad_(), old.to(dtype), advantages.to(dtype), mask


def reference(
    inputs: Inputs, loss: SequenceLossSettings, state: BandState, rollout_weight_B: torch.Tensor
) -> torch.Tensor:
    """Sequence by sequence, ``max(-A w, -A clip(w))`` under autograd; no code shared with the implementation."""
    log_prob, old, advantages, mask = inputs
    losses = []
    for i in range(log_prob.shape[0]):
        tokens = mask[i].nonzero().flatten()
        if len(tokens) == 0:
            losses.append(log_prob[i, tokens].sum())
            continue
        length, A = len(tokens), advantages[i, tokens[0]]
        S = (log_prob[i, tokens] - old[i, tokens]).sum()
        mu = -length * state.drift_per_token if loss.drift == "kl" else 0.0
        growth = math.exp(loss.exponent * math.log(length))
        low, high = loss.c_low * growth, loss.c_high * growth
        if loss.band == "quantile":
            k = sum(1 for edge in FINE_LENGTH_EDGES.tolist() if edge <= length) - 1
            low = high = state.half_width_K[k] * math.sqrt(length)
        n = length if loss.weight == "length_normalised" else 1
        ratio = torch.exp(S / n)
        value = torch.maximum(-A * ratio, -A * torch.clamp(ratio, math.exp((mu - low) / n), math.exp((mu + high) / n)))
        h = loss.grad_multiplier * (1 / length if loss.grad_scale == "1/L" else 1.0)
        losses.append(value * h * n * rollout_weight_B[i])
    return torch.stack(losses)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient_equal_the_reference(name: str, weighted: bool) -> None:
    inputs = batch()
    rollout_weight = torch.rand(64, dtype=F64) + 0.5 if weighted else torch.ones(64, dtype=F64)
    weights_BT = rollout_weight[:, None].expand(64, 50) if weighted else None
    output = sequence_policy_loss(*inputs, VARIANTS[name], STATE, weights_BT)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), inputs[0])
    expected = reference(inputs, VARIANTS[name], STATE, rollout_weight)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), inputs[0])
    torch.testing.assert_close(output.loss_B, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-14)
    clipped = output.clipped_high_B | output.clipped_low_B
    assert clipped.any() and (output.valid_B & ~clipped).any(), "the batch must lie on both sides of the band"


any_loss = st.one_of(
    st.sampled_from(sorted(ALGORITHMS)).map(ALGORITHMS.__getitem__),
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
    st.floats(0.1, 3),
)
@settings(max_examples=120)
def test_any_member_equals_the_reference_whatever_padding_holds(
    loss: SequenceLossSettings, seed: int, scale: float, junk: float, rollout_weight: float
) -> None:
    *tensors, mask = batch(seed, sequences=6, width=12, scale=scale)
    log_prob, old, advantages = (t.detach().masked_fill(~mask, junk) for t in tensors)
    advantages = advantages.round().masked_fill(~mask, junk)  # some are 0
    weights = torch.full_like(old, rollout_weight).masked_fill(~mask, junk)
    inputs = (log_prob.requires_grad_(), old, advantages, mask)
    output = sequence_policy_loss(*inputs, loss, STATE, weights)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
    expected = reference(inputs, loss, STATE, torch.full((6,), rollout_weight, dtype=F64))
    (expected_gradient,) = torch.autograd.grad(expected.sum(), log_prob)
    torch.testing.assert_close(output.loss_B, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient.masked_fill(~mask, 0.0), rtol=1e-10, atol=1e-12)


@given(
    any_loss,
    st.sampled_from([1e4, -1e4, 300.0, -300.0, 89.0]),
    st.sampled_from([1.0, -1.0]),
    st.sampled_from([torch.float32, torch.bfloat16, F64]),
    st.integers(1, 40),
)
@settings(max_examples=60)
def test_extreme_statistics_give_finite_losses_and_gradients(
    loss: SequenceLossSettings, S: float, A: float, dtype: torch.dtype, length: int
) -> None:
    old = torch.full((1, length), -1.0, dtype=dtype)
    log_prob = (old + S / length).requires_grad_()
    mask = torch.ones(1, length, dtype=torch.bool)
    output = sequence_policy_loss(log_prob, old, torch.full_like(old, A), mask, loss, STATE)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
    assert bool(torch.isfinite(output.loss_B.detach()).all()) and bool(torch.isfinite(gradient).all())
    assert output.loss_B.dtype == torch.promote_types(dtype, torch.float32)
    assert float(output.log_ratio_B) == pytest.approx(S, rel=0.02)


def test_diagnostics_follow_their_definitions() -> None:
    loss = SequenceLossSettings(c_low=0.02, c_high=0.03, s_max=0.3)
    log_prob, old, advantages, mask = inputs = batch()
    out = sequence_policy_loss(*inputs, loss)
    S = torch.where(mask, log_prob - old, 0.0).sum(-1).detach()
    torch.testing.assert_close(out.log_ratio_B, S)
    assert out.length_B.tolist() == mask.sum(-1).tolist() and out.length_B.dtype == torch.int64
    valid, A = mask.any(-1), advantages.sum(-1) / mask.sum(-1).clamp(min=1)
    torch.testing.assert_close(out.advantage_B, A)
    root = mask.sum(-1).clamp(min=1).sqrt()
    above, below = 0.03 * root < S, -0.02 * root > S
    for got, expected in (
        (out.valid_B, valid),
        (out.accepted_B, valid & ~above & ~below),
        (out.clipped_high_B, above & (A > 0)),
        (out.clipped_low_B, below & (A < 0)),
        (out.overflow_B, S > 0.3),
    ):
        assert torch.equal(got, expected) and bool(got.any()) and not bool(got.all())
    torch.testing.assert_close(out.weight_B, S.clamp(max=0.3).exp())
    for field in dataclasses.fields(SequenceLossOutput):
        assert getattr(out, field.name).requires_grad == (field.name == "loss_B")


def one_row(S: float, A: float, loss: SequenceLossSettings, length: int = 4) -> tuple[SequenceLossOutput, float]:
    """Output and coefficient (gradient to each log-prob) of a single sequence with the given statistic."""
    log_prob = torch.full((1, length), S / length, dtype=F64, requires_grad=True)
    old = torch.zeros(1, length, dtype=F64)
    mask = torch.ones(1, length, dtype=torch.bool)
    output = sequence_policy_loss(log_prob, old, torch.full_like(old, A), mask, loss)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
    assert bool((gradient == gradient[0, 0]).all())
    return output, float(gradient[0, 0])


def test_the_band_is_closed_and_on_policy_data_survives_a_zero_width() -> None:
    edge = SequenceLossSettings(c_low=0.25, c_high=0.25)  # exactly 0.5 at L = 4
    assert one_row(0.5, 1.0, edge)[1] == pytest.approx(-math.exp(0.5))
    assert one_row(0.5 + 1e-9, 1.0, edge)[1] == 0
    zero = SequenceLossSettings(c_low=0.0, c_high=0.0)
    output, slope = one_row(0.0, 1.0, zero)
    assert bool(output.accepted_B) and slope == -1.0


@pytest.mark.parametrize("S", [30.0, 1e4])
def test_guard_keeps_the_gradient_with_a_constant_weight(S: float) -> None:
    loss = SequenceLossSettings(s_max=5.0)
    output, slope = one_row(S, -2.0, loss)
    assert float(output.loss_B.detach()) == pytest.approx(2 * math.exp(5))
    assert slope == pytest.approx(2 * math.exp(5))
    assert bool(output.overflow_B) and float(output.weight_B) == pytest.approx(math.exp(5))
    assert not bool(one_row(4.9, -2.0, loss)[0].overflow_B)
    per_token = dataclasses.replace(loss, weight="length_normalised")  # the guard is on the log-weight, S / 4 here
    assert bool(one_row(S, -2.0, per_token)[0].overflow_B) == (S / 4 > 5)
    assert not bool(one_row(19.6, -2.0, per_token)[0].overflow_B)


def test_log_ratio_is_accurate_at_length_and_in_half_precision() -> None:
    batch = synthetic_batch([32768, 20000], [0.03, 0.03], [1.0, -1.0])
    log_prob, old, mask = batch.log_prob_BT, batch.old_log_prob_BT, batch.mask_BT
    exact = sequence_log_ratio(log_prob, old, mask)
    assert exact.dtype == F64
    single = sequence_log_ratio(log_prob.float(), old.float(), mask)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=2e-4)
    half = sequence_log_ratio(log_prob.bfloat16(), old.bfloat16(), mask)
    rounded_first = sequence_log_ratio(log_prob.bfloat16().double(), old.bfloat16().double(), mask)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), rounded_first, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("which", "value", "says"),
    [
        (0, math.nan, ("log_prob_BT", "token 2", "nan")),
        (0, -math.inf, ("log_prob_BT", "token 2", "-inf")),
        (1, math.inf, ("old_log_prob_BT", "token 2", "inf")),
        (2, 9.0, ("advantages_BT", "grpo", "rloo")),
        (2, math.nan, ("advantages_BT",)),
        (4, 9.0, ("rollout_is_weights_BT", "whole sequence")),
        (4, math.inf, ("rollout_is_weights_BT",)),
    ],
)
def test_values_that_have_no_loss_are_refused_by_row(which: int, value: float, says: tuple[str, ...]) -> None:
    log_prob, old, advantages, mask = batch(sequences=8)
    row = int((mask.sum(-1) > 3).nonzero()[-1])
    arguments = [log_prob.detach(), old, advantages, mask, torch.ones_like(old)]
    arguments[which][row, mask[row].nonzero()[2]] = value
    with pytest.raises(UnusableRowsError, match=holds(f"row {row} ", *says)):
        sequence_policy_loss(*arguments[:4], ALGORITHMS["fspo"], None, arguments[4])


def test_a_sum_that_overflows_and_other_shapes_are_refused_too() -> None:
    huge = torch.full((2, 2), -3e38)
    mask = torch.tensor([[True, False], [True, True]])
    with pytest.raises(UnusableRowsError, match=holds("row 1 ", "S ")):
        sequence_policy_loss(huge, torch.zeros(2, 2), torch.ones(2, 2), mask, ALGORITHMS["fspo"])
    log_prob, old, advantages, mask = batch()
    with pytest.raises(ValueError, match=holds("advantages_BT", "(64, 1)", "(64, 50)")):
        sequence_policy_loss(log_prob, old, advantages[:, :1], mask, ALGORITHMS["fspo"])
    with pytest.raises(ValueError, match=r"advantages_BT has shape .*expand_as"):
        sequence_policy_loss(log_prob, old, advantages[:, 0], mask, ALGORITHMS["fspo"])
    with pytest.raises(ValueError, match=r"from_packed"):
        sequence_policy_loss(log_prob[0], old[0], advantages[0], mask[0], ALGORITHMS["fspo"])
    with pytest.raises(ValueError, match=holds("log_prob_BT", "(50,)")):
        sequence_policy_loss(log_prob[0], old[0], advantages[0], mask[0], ALGORITHMS["fspo"])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_nothing_to_learn_from_is_zero_loss_and_zero_gradient(shape: tuple[int, int]) -> None:
    log_prob = torch.full(shape, math.nan, requires_grad=True)
    nothing = torch.zeros(shape, dtype=torch.bool)
    for loss in VARIANTS.values():
        output = sequence_policy_loss(log_prob, log_prob.detach(), log_prob.detach(), nothing, loss, STATE)
        (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
        assert torch.equal(gradient, torch.zeros(shape)) and torch.equal(output.loss_B, torch.zeros(shape[0]))
        assert not bool((output.valid_B | output.accepted_B | output.overflow_B).any())
