"""Calibration of the bands: estimators, causality, windows, checkpoints, and the fairness it buys.

The log-ratios are synthetic. Samples come from pi_old, so the mean of exp(S) is 1 whatever the model. This forces a
drift: S cannot have dispersion without a negative mean. Short responses hide the drift, so bands are studied here on
log-ratios for which the identity holds *exactly*. Defined here.
"""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from messages import holds

from fspo.calibration import BandController, drift_per_token
from fspo.fairness.lre import Array, LengthReweightingError, equal_mass_starts, length_reweighting_error, merge_bins
from fspo.length_bins import FINE_BINS, length_bin
from fspo.losses import acceptance_band
from fspo.responses import Responses
from fspo.types import BandState, SequenceLossSettings

QUANTILE = SequenceLossSettings(band="quantile", target_acceptance=0.85)
V1 = SequenceLossSettings(drift="kl")


def gaussian_log_ratios(length_B: np.ndarray, sigma_B: Array | float, rng: np.random.Generator) -> Array:
    """``S ~ N(-sigma**2 * L / 2, sigma**2 * L)``: the Gaussian S of that dispersion with E[exp S] = 1."""
    variance_B = np.square(sigma_B) * length_B
    return np.asarray(rng.normal(-variance_B / 2, np.sqrt(variance_B)))


def measured_acceptance(
    S_B: Array, length_B: np.ndarray, settings: SequenceLossSettings, state: BandState
) -> np.ndarray:
    """Whether each log-ratio lies inside its (closed) band."""
    lower_B, upper_B = acceptance_band(torch.from_numpy(length_B), settings, state, torch.float64)
    return np.asarray((lower_B.numpy() <= S_B) & (upper_B.numpy() >= S_B))


def rollout_batch_of(*mini_batches: tuple[Array, np.ndarray], unmoved: int = 1) -> Responses:
    """Of S and L of each mini-batch, in order; before the first ``unmoved`` no weight had moved."""
    parts = []
    for index, (S, L) in enumerate(mini_batches):
        place = {"update": index, "minibatch": (index + 1) * (index >= unmoved)}
        columns = {name: np.full(len(S), value) for name, value in place.items()}
        parts.append(Responses.of_rows({"S": S, "L": L} | columns))
    return Responses.join(parts)


def uneven_rollout_batch(rng: np.random.Generator, batch: int) -> list[tuple[Array, np.ndarray]]:
    """``(S_B, length_B)`` of each of the 4 mini-batches of a rollout batch whose dispersion is *not* sqrt(L).

    Like a small recorded run it has lengths from 1 to 220, a dispersion that is low below 20 tokens and high from 20 to
    60, and sequences of uneven scale (heavy tails). A common scale varies by rollout batch and grows with the position
    of the mini-batch, from 0 in the first.
    """
    level = 0.033 * math.exp(rng.normal(0.0, 0.15))
    result = []
    for position in range(4):
        length_B = np.clip(rng.gamma(2.2, 40.0, batch), 1, 220).astype(np.int64)
        shape_B = np.interp(np.log(length_B), np.log([1, 15, 35, 80, 220]), [0.5, 0.5, 1.45, 0.95, 0.9])
        sigma_B = level * position / 3 * shape_B * np.exp(rng.normal(0.0, 0.4, batch))
        result.append((gaussian_log_ratios(length_B, sigma_B, rng), length_B))
    return result


def mini_batch(sigma: float, seed: int, n: int = 2000, longest: int = 400) -> tuple[Array, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, n)
    return gaussian_log_ratios(lengths, sigma, rng), lengths


def test_drift_is_recovered_by_position_and_is_zero_on_policy() -> None:
    assert drift_per_token(-3.0, 1000.0) == pytest.approx(3e-3)
    assert drift_per_token(3.0, 1000.0) == drift_per_token(0.0, 0.0) == 0.0
    sigmas = [0.06 * i / 3 for i in range(4)]  # of the mini-batches
    state = BandController(V1).update(
        rollout_batch_of(*(mini_batch(sigma, i, longest=4000) for i, sigma in enumerate(sigmas)))
    )
    expected = [sigma**2 / 2 for sigma in sigmas]
    assert state.drift_by_mini_batch == pytest.approx(expected, rel=0.1)
    # So S = 0, as in the first mini-batch, stays inside the band of long sequences.
    lower, upper = acceptance_band(torch.tensor([10, 4000, 100_000]), V1, state.at_mini_batch(0))
    assert bool((lower <= 0).all()) and bool((upper >= 0).all())


def widths(*parts: tuple[int, int, float]) -> dict[int, float]:
    """Half-width at some lengths, after so many sequences of each length and dispersion."""
    lengths, sigma = (np.concatenate([np.full(part[0], part[i]) for part in parts]) for i in (1, 2))
    S = sigma * np.sqrt(lengths) * np.random.default_rng(0).normal(size=lengths.size)
    state = BandController(QUANTILE).update(rollout_batch_of((S, lengths), unmoved=0))
    assert len(state.half_width_K) == FINE_BINS and min(state.half_width_K) > 0
    return {L: state.half_width_K[int(length_bin(L))] for L in (10, 100, 200, 5000, 100_000)}


def test_local_widths_follow_the_dispersion_and_shrink_where_thin() -> None:
    at = widths((3000, 10, 0.01), (3000, 200, 0.04), (5, 5000, 1.0))
    assert at[10] == pytest.approx(1.44 * 0.01, rel=0.05) and at[200] == pytest.approx(1.44 * 0.04, rel=0.05)
    pooled = at[100_000]  # no sequence anywhere near: the plain sqrt(L) band
    assert at[10] < pooled < at[200]
    assert pooled < at[5000] < 0.5  # five sequences of dispersion 1 move it by 5 parts in 25
    # A thin bin borrows from its neighbours in length.
    assert widths((3000, 10, 0.01), (10, 100, 0.04), (3000, 110, 0.04))[100] == pytest.approx(1.44 * 0.04, rel=0.05)


def test_sequences_that_did_not_move_count_in_the_quantile() -> None:
    lengths = np.full(4000, 100)
    S = np.where(np.arange(4000) < 2000, 0.0, np.random.default_rng(0).normal(size=4000) * 0.3)
    settings = SequenceLossSettings(band="quantile", target_acceptance=0.75)
    state = BandController(settings).update(rollout_batch_of((S, lengths), unmoved=0))
    assert measured_acceptance(S, lengths, settings, state).mean() == pytest.approx(0.75, abs=0.01)


def test_mini_batches_that_did_not_move_give_no_width() -> None:
    assert BandController(QUANTILE).update(rollout_batch_of(mini_batch(0.0, 0), mini_batch(0.0, 1))).half_width_K == ()
    assert BandController(QUANTILE).update(rollout_batch_of(mini_batch(0.03, 0))).half_width_K == ()
    assert BandController(QUANTILE).update(rollout_batch_of(mini_batch(0.03, 0), unmoved=0)).half_width_K
    still, still_too, moved = mini_batch(0.0, 0), mini_batch(0.0, 1), mini_batch(0.03, 2)
    warm_up = BandController(QUANTILE).update(rollout_batch_of(still, still_too, moved, unmoved=2))
    assert warm_up == BandController(QUANTILE).update(rollout_batch_of(still, moved))


def rollout_batch(seed: int, scale: float = 1.0) -> Responses:
    """Four mini-batches; the policy moves further with each."""
    return rollout_batch_of(*(mini_batch(0.01 * scale * i, 10 * seed + i, n=300) for i in range(4)))


@pytest.mark.parametrize("settings", [QUANTILE, V1])
def test_state_is_causal_forgets_after_the_window_and_continues_from_a_checkpoint(
    settings: SequenceLossSettings,
) -> None:
    controller = BandController(settings, window=2)
    assert controller.state == BandState()
    first = controller.update(rollout_batch(1))
    assert controller.state is first != BandState()
    controller.update(rollout_batch(2, scale=20))
    controller.update(rollout_batch(3))
    clean = BandController(settings, window=2)
    clean.update(rollout_batch(3))
    restored = BandController(settings, window=2)
    restored.load_state_dict(pickle.loads(pickle.dumps(controller.state_dict())))
    assert restored.state == controller.state
    fourth = controller.update(rollout_batch(4))
    assert fourth == clean.update(rollout_batch(4)) == restored.update(rollout_batch(4))
    restored.load_state_dict(BandController(settings).state_dict())
    assert restored.state == BandState()


def test_the_state_of_another_band_is_refused() -> None:
    with pytest.raises(ValueError, match=holds("drift='kl'", "drift='none'")):
        BandController(QUANTILE).load_state_dict(BandController(V1).state_dict())
    with pytest.raises(ValueError, match=holds("drift='kl'")):
        BandController(V1).load_state_dict({"drift": "kl", "rounds": []})


def fairness(kept: list[tuple[np.ndarray, np.ndarray]]) -> LengthReweightingError:
    """Of pairs: which sequences are accepted, and the length of each."""
    rows = [length_bin(np.concatenate(lengths))
            for lengths in ([L[inside] for inside, L in kept], [L for _, L in kept])]  # fmt: skip
    accepted, total = (np.bincount(row, minlength=FINE_BINS) for row in rows)
    starts = equal_mass_starts(total, 8)
    return length_reweighting_error(merge_bins(accepted, starts), merge_bins(total, starts))


def test_quantile_band_is_fair_to_length_where_sqrt_is_not() -> None:
    """Debiased LRE at most 0.01 at equal acceptance, applied causally to a run whose dispersion is not sqrt(L)."""
    rng = np.random.default_rng(3)
    run = [uneven_rollout_batch(rng, 256) for _ in range(28)]
    # At the same target without looking at lengths: c is the quantile of |S| / sqrt(L) over the whole run.
    c = float(np.quantile(np.concatenate([np.abs(S) / np.sqrt(L) for parts in run[8:] for S, L in parts[1:]]), 0.85))
    errors = {}
    for settings in (SequenceLossSettings(c_low=c, c_high=c), QUANTILE):
        controller, kept = BandController(settings), []
        for number, parts in enumerate(run):
            if number >= 8:
                kept += [(measured_acceptance(S, L, settings, controller.state), L) for S, L in parts[1:]]
            controller.update(rollout_batch_of(*parts))
        errors[settings.band] = fairness(kept)
    assert errors["quantile"].rate == pytest.approx(0.85, abs=0.02)
    assert errors["quantile"].debiased.value <= 0.01 < 0.02 < errors["power"].debiased.value
