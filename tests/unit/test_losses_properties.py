"""Properties that every member of the family must have, on random batches."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.sums import FINE_LENGTH_EDGES
from fspo.types import BandState, SequenceLossOutput, SequenceLossSettings

F64 = torch.float64
STATE = BandState(
    drift_per_token=1e-3,
    half_width_K=(0.04,) * (FINE_LENGTH_EDGES.numel() - 1),
    active_line=(0.05, 0.02),
)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

quick = settings(max_examples=60)
losses = st.one_of(
    st.sampled_from(sorted(ALGORITHMS)).map(ALGORITHMS.__getitem__),
    st.builds(
        SequenceLossSettings,
        band=st.sampled_from(["constant", "sqrt", "linear"]),
        clip_low=st.floats(0, 0.5),
        clip_high=st.floats(0, 0.5),
        drift=st.sampled_from(["none", "kl"]),
        weight=st.sampled_from(["sequence", "length_normalised"]),
        grad_scale=st.sampled_from(["1", "1/L"]),
        grad_multiplier=st.floats(0.1, 100),
    ),
)


@st.composite
def batches(draw: st.DrawFn) -> Inputs:
    """Up to 7 sequences of up to 12 tokens, masks with holes, any scale of the log-ratios, some advantages 0."""
    sequences, width = draw(st.integers(1, 7)), draw(st.integers(1, 12))
    scale = draw(st.sampled_from([0.0, 1e-4, 0.01, 0.1, 3.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    old = -torch.rand(sequences, width, generator=generator, dtype=F64)
    log_prob = old + scale * torch.randn(sequences, width, generator=generator, dtype=F64)
    mask = torch.rand(sequences, width, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    sign = torch.randint(-1, 2, (sequences, 1), generator=generator)
    return log_prob, old, (sign * torch.rand(sequences, 1, generator=generator, dtype=F64)).expand_as(old), mask


def run(inputs: Inputs, loss: SequenceLossSettings) -> tuple[SequenceLossOutput, torch.Tensor]:
    log_prob = inputs[0].detach().clone().requires_grad_()
    output = sequence_policy_loss(log_prob, *inputs[1:], loss, STATE)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
    return output, gradient


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@given(batches(), losses, st.sampled_from([0.0, 7.0, math.nan, math.inf, -math.inf]), st.integers(0, 3))
@quick
def test_padding_changes_nothing_whatever_it_holds(
    inputs: Inputs, loss: SequenceLossSettings, junk: float, pad: int
) -> None:
    output, gradient = run(inputs, loss)
    *floats, mask = inputs
    padded = [torch.nn.functional.pad(t.masked_fill(~mask, junk), (0, pad, 0, pad), value=junk) for t in floats]
    padded_mask = torch.nn.functional.pad(mask, (0, pad, 0, pad))
    padded_output, padded_gradient = run((*padded, padded_mask), loss)  # type: ignore[arg-type]
    rows, width = mask.shape
    close(padded_output.loss_B[:rows], output.loss_B)
    close(padded_gradient[:rows, :width], gradient)
    assert not padded_gradient[~padded_mask].any() and not padded_output.loss_B[rows:].any()


@given(batches(), losses, st.randoms(use_true_random=False))
@quick
def test_order_of_sequences_does_not_matter(inputs: Inputs, loss: SequenceLossSettings, random: object) -> None:
    output, gradient = run(inputs, loss)
    order = list(range(inputs[0].shape[0]))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled_output, shuffled_gradient = run(tuple(t[order] for t in inputs), loss)  # type: ignore[arg-type]
    close(shuffled_output.loss_B, output.loss_B[order])
    close(shuffled_gradient, gradient[order])


@given(batches(), losses)
@quick
def test_a_masked_token_is_a_deleted_token(inputs: Inputs, loss: SequenceLossSettings) -> None:
    output, gradient = run(inputs, loss)
    for i, mask in enumerate(inputs[3]):
        kept = tuple(t[i : i + 1, mask] for t in inputs)
        kept_output, kept_gradient = run(kept, loss)  # type: ignore[arg-type]
        close(kept_output.loss_B, output.loss_B[i : i + 1])
        close(kept_gradient, gradient[i : i + 1, mask])


@given(batches(), losses)
@quick
def test_on_policy_gradient_is_reinforce(inputs: Inputs, loss: SequenceLossSettings) -> None:
    _, old, advantages, mask = inputs
    log_prob = old.clone().requires_grad_()
    state = dataclasses.replace(STATE, drift_per_token=0.0)  # as measured in the first mini-batch of a round
    output = sequence_policy_loss(log_prob, old, advantages, mask, loss, state)
    (gradient,) = torch.autograd.grad(output.loss_B.sum(), log_prob)
    length = mask.sum(-1, keepdim=True).clamp(min=1).double()
    h = loss.grad_multiplier / (length if loss.grad_scale == "1/L" else 1)
    close(gradient, -advantages * mask * h)
    assert torch.equal(output.accepted_B, output.valid_B)


@given(batches(), losses)
@quick
def test_gradient_vanishes_where_the_clip_is_active_and_only_there(inputs: Inputs, loss: SequenceLossSettings) -> None:
    output, gradient = run(inputs, loss)
    removed = output.clipped_high_B | output.clipped_low_B
    silent = removed | (output.advantage_B == 0) | ~output.valid_B
    assert not gradient[silent].any()
    assert gradient[inputs[3] & ~silent[:, None]].all()
    # Clipping needs the sign to match the side, so the two kinds never overlap and never hit an accepted sequence.
    both = output.clipped_high_B & output.clipped_low_B
    assert not both.any() and not (removed & output.accepted_B).any()
    assert (output.advantage_B[removed] != 0).all()
    assert (gradient.sign()[~silent] == -(output.advantage_B[:, None].sign() * inputs[3])[~silent]).all()


@given(batches(), losses)
@quick
def test_surrogate_is_pessimistic(inputs: Inputs, loss: SequenceLossSettings) -> None:
    """Never below the unclipped surrogate; equal to it when accepted."""
    output, _ = run(inputs, loss)
    length = output.length_B.clamp(min=1).double()
    n = length if loss.weight == "length_normalised" else 1
    h = loss.grad_multiplier / (length if loss.grad_scale == "1/L" else 1)
    unclipped = -output.advantage_B * output.weight_B * h * n
    slack = 1e-12 + 1e-9 * unclipped.abs()
    assert (output.loss_B >= unclipped - slack).all()
    close(output.loss_B[output.accepted_B], unclipped[output.accepted_B])


@given(
    losses,
    st.sampled_from([1e4, -1e4, 300.0, -300.0, 89.0]),
    st.sampled_from([1.0, -1.0]),
    st.sampled_from([torch.float32, torch.bfloat16, F64]),
    st.integers(1, 40),
)
@quick
def test_extreme_statistics_give_finite_losses_and_gradients(
    loss: SequenceLossSettings, S: float, A: float, dtype: torch.dtype, length: int
) -> None:
    old = torch.full((1, length), -1.0, dtype=dtype)
    inputs = (old + S / length, old, torch.full_like(old, A), torch.ones(1, length, dtype=torch.bool))
    output, gradient = run(inputs, loss)
    assert bool(torch.isfinite(output.loss_B.detach()).all()) and bool(torch.isfinite(gradient).all())
    assert float(output.log_ratio_B) == pytest.approx(S, rel=0.02)


@given(batches(), losses, st.floats(0.1, 3))
@quick
def test_rollout_weights_scale_loss_and_gradient_only(inputs: Inputs, loss: SequenceLossSettings, v: float) -> None:
    output, gradient = run(inputs, loss)
    log_prob = inputs[0].clone().requires_grad_()
    weights = torch.full_like(log_prob, v).masked_fill(~inputs[3], 0.0).detach()
    weighted = sequence_policy_loss(log_prob, *inputs[1:], loss, STATE, weights)
    close(weighted.loss_B, v * output.loss_B)
    close(torch.autograd.grad(weighted.loss_B.sum(), log_prob)[0], v * gradient)
    close(weighted.weight_B, output.weight_B)
    assert torch.equal(weighted.accepted_B, output.accepted_B)
