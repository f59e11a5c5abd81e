"""Calibration of the bands: estimators, causality, windows, checkpoints, and the fairness it buys."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from benchmarks.synthetic import gaussian_log_ratios, measured_acceptance, sums_of_log_ratios, uneven_rollout_batch
from fspo.calibration import BandController, active_line, drift_per_token, leans, local_half_widths
from fspo.clipping import acceptance_band
from fspo.fairness.bins import equal_mass_starts, merge_bins
from fspo.fairness.lre import length_reweighting_error
from fspo.sums import FINE_LENGTH_EDGES, SequenceSums, length_bin
from fspo.types import BandState, SequenceLossSettings

QUANTILE = SequenceLossSettings(band="quantile", target_acceptance=0.85)
ACTIVE = SequenceLossSettings(band="active", target_acceptance=0.85)
V1 = SequenceLossSettings(drift="kl")
QUANTILE_V1 = SequenceLossSettings(band="quantile", target_acceptance=0.85, drift="kl")
K = FINE_LENGTH_EDGES.numel() - 1


def sums(sigma: float, seed: int, n: int = 2000, longest: int = 400) -> SequenceSums:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, n)
    return sums_of_log_ratios(gaussian_log_ratios(lengths, sigma, rng), lengths)


def a_round(sigma: float, seed: int = 0, **options: int) -> list[SequenceSums]:
    """Mini-batches whose dispersion grows linearly from 0; the last has the given one."""
    return [sums(sigma * i / 3, 10 * seed + i, **options) for i in range(4)]


def test_before_any_data_the_state_is_the_default() -> None:
    assert BandController(QUANTILE_V1).state == BandState()


def test_drift_is_recovered_by_position_and_is_zero_on_policy() -> None:
    state = BandController(V1).update(a_round(0.06, longest=4000))
    expected = [(0.06 * i / 3) ** 2 / 2 for i in range(4)]
    assert state.drift_by_mini_batch == pytest.approx(expected, rel=0.1)
    assert state.drift_by_mini_batch[0] == 0.0
    assert state.drift_per_token == pytest.approx(np.mean(expected[1:]), rel=0.1)
    assert BandController(QUANTILE).update(a_round(0.06)).drift_by_mini_batch == (0.0,) * 4


def test_drift_is_a_ratio_of_sums_and_never_negative() -> None:
    assert drift_per_token(-3.0, 1000.0) == pytest.approx(3e-3)
    assert drift_per_token(3.0, 1000.0) == drift_per_token(0.0, 0.0) == 0.0


@pytest.mark.parametrize("settings", [QUANTILE, QUANTILE_V1])
@pytest.mark.parametrize("target", [0.5, 0.85, 0.95])
def test_target_acceptance_is_met_on_fresh_gaussian_data(settings: SequenceLossSettings, target: float) -> None:
    settings = SequenceLossSettings(band=settings.band, drift=settings.drift, target_acceptance=target)
    controller = BandController(settings)
    for seed in range(4):
        state = controller.update([SequenceSums.zeros(), sums(0.03, seed)])
    rng = np.random.default_rng(99)
    lengths = rng.integers(1, 401, 4000)
    S = gaussian_log_ratios(lengths, 0.03, rng)
    assert measured_acceptance(S, lengths, settings, state).mean() == pytest.approx(target, abs=0.025)


def test_local_widths_follow_the_dispersion_and_shrink_where_thin() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([np.full(3000, 10), np.full(3000, 200), np.full(5, 5000)])
    sigma = np.concatenate([np.full(3000, 0.01), np.full(3000, 0.04), np.full(5, 1.0)])
    part = sums_of_log_ratios(sigma * np.sqrt(lengths) * rng.normal(size=lengths.size), lengths)
    widths = BandController(QUANTILE).update([SequenceSums.zeros(), part]).half_width_K
    at = {L: widths[int(length_bin(torch.tensor([L])))] for L in (1, 10, 200, 5000, 100_000)}
    assert at[10] == pytest.approx(1.44 * 0.01, rel=0.05) and at[200] == pytest.approx(1.44 * 0.04, rel=0.05)
    pooled = at[100_000]  # no sequence anywhere near: the plain sqrt(L) band
    assert at[10] < pooled < at[200]
    assert pooled < at[5000] < 0.5  # five sequences of dispersion 1 move it by 5 parts in 25
    assert len(widths) == K and min(widths) > 0


def test_thin_bins_borrow_from_their_neighbours_in_length() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([np.full(3000, 10), np.full(10, 100), np.full(3000, 110)])
    sigma = np.where(lengths == 10, 0.01, 0.04)
    part = sums_of_log_ratios(sigma * np.sqrt(lengths) * rng.normal(size=lengths.size), lengths)
    widths = BandController(QUANTILE).update([SequenceSums.zeros(), part]).half_width_K
    assert widths[int(length_bin(torch.tensor([100])))] == pytest.approx(1.44 * 0.04, rel=0.05)


def test_sequences_that_did_not_move_count_in_the_quantile() -> None:
    lengths = np.full(4000, 100)
    S = np.where(np.arange(4000) < 2000, 0.0, np.random.default_rng(0).normal(size=4000) * 0.3)
    settings = SequenceLossSettings(band="quantile", target_acceptance=0.75)
    state = BandController(settings).update([SequenceSums.zeros(), sums_of_log_ratios(S, lengths)])
    assert measured_acceptance(S, lengths, settings, state).mean() == pytest.approx(0.75, abs=0.01)


def test_quantiles_of_the_histogram_are_those_of_the_data() -> None:
    folded = np.zeros((K, 130))
    rng = np.random.default_rng(0)
    z = np.abs(rng.normal(size=50_000)) * 0.03
    part = sums_of_log_ratios(z * 10, np.full(z.size, 100))
    folded[:, :] = part.hist_KH.numpy()[:, 131:]
    for level in (0.1, 0.5, 0.9):
        width = local_half_widths(folded, level, 100)[int(length_bin(torch.tensor([100])))]
        assert width == pytest.approx(np.quantile(z, level), rel=0.01)


def test_a_policy_that_did_not_move_gives_no_width() -> None:
    state = BandController(QUANTILE).update([sums(0.0, 0), sums(0.0, 1)])
    assert state.half_width_K == ()
    on_policy_only = BandController(QUANTILE).update([sums(0.03, 0)])
    assert on_policy_only.half_width_K == ()
    counted = BandController(QUANTILE).update([sums(0.03, 0)], unmoved=0)
    assert counted.half_width_K
    controller = BandController(QUANTILE)
    warm_up = controller.update([sums(0.0, 0), sums(0.0, 1), sums(0.03, 2)], unmoved=2)
    assert warm_up.half_width_K == BandController(QUANTILE).update([sums(0.0, 0), sums(0.03, 2)]).half_width_K
    restored = BandController(QUANTILE)
    restored.load_state_dict(controller.state_dict())
    assert restored.state == warm_up


def test_state_is_causal_and_forgets_after_the_window() -> None:
    controller = BandController(QUANTILE_V1, window=2)
    first = controller.update(a_round(0.03, 1))
    assert controller.state is first
    controller.update(a_round(0.5, 2))
    controller.update(a_round(0.03, 3))
    forgotten = controller.update(a_round(0.03, 4))
    clean = BandController(QUANTILE_V1, window=2)
    clean.update(a_round(0.03, 3))
    assert forgotten == clean.update(a_round(0.03, 4))


@pytest.mark.parametrize("settings", [QUANTILE, V1, QUANTILE_V1])
def test_checkpoint_continues_bit_for_bit(settings: SequenceLossSettings) -> None:
    controller = BandController(settings, window=3)
    for seed in range(4):
        controller.update(a_round(0.03, seed))
    saved = pickle.loads(pickle.dumps(controller.state_dict()))
    restored = BandController(settings, window=3)
    restored.load_state_dict(saved)
    assert restored.state == controller.state
    assert restored.update(a_round(0.02, 9)) == controller.update(a_round(0.02, 9))
    empty = BandController(settings)
    empty.load_state_dict(BandController(settings).state_dict())
    assert empty.state == BandState()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="mini_batches is empty"):
        BandController(V1).update([])
    with pytest.raises(ValueError, match="leans of each of the 4 mini-batches, got 0"):
        BandController(ACTIVE).update(a_round(0.03))
    with pytest.raises(ValueError, match="window=0"):
        BandController(V1, window=0)
    with pytest.raises(ValueError, match=r"drift='kl'.*drift='none'"):
        BandController(QUANTILE).load_state_dict(BandController(V1).state_dict())
    wrong = {"drift": "kl", "rounds": [{"totals_M4": np.zeros((2, 4)), "folded_KC": np.zeros((3, 3))}]}
    with pytest.raises(ValueError, match="another version"):
        BandController(V1).load_state_dict(wrong)


def test_drifted_centre_keeps_the_first_mini_batch_of_a_round() -> None:
    state = BandController(V1).update(a_round(0.06, longest=4000))
    lengths = torch.tensor([10, 4000, 100_000])
    _, lower, upper = acceptance_band(lengths, V1, state.at_mini_batch(0))
    assert bool((lower <= 0).all()) and bool((upper >= 0).all())
    assert float(acceptance_band(lengths, V1, state)[2][-1]) < 0  # which the pooled drift would not


@pytest.mark.parametrize("target", [0.85, 0.9])
def test_quantile_band_is_fair_to_length_where_sqrt_is_not(target: float) -> None:
    """Debiased LRE at most 0.01 at equal acceptance, applied causally to a run whose dispersion is not sqrt(L)."""
    rng = np.random.default_rng(3)
    run = [uneven_rollout_batch(rng, 256) for _ in range(28)]
    errors, rates = {}, {}
    # At the same target without looking at lengths: c is the quantile of |S| / sqrt(L) over the whole run.
    later = [np.abs(S) / np.sqrt(L) for parts in run[8:] for S, L in parts[1:]]
    c = float(np.quantile(np.concatenate(later), target))
    for band, settings in (
        ("sqrt", SequenceLossSettings(clip_low=c, clip_high=c)),
        ("quantile", SequenceLossSettings(band="quantile", target_acceptance=target)),
    ):
        controller = BandController(settings)
        counts = np.zeros((2, K))
        for number, parts in enumerate(run):
            for S, L in parts[1:] if number >= 8 else []:
                inside = measured_acceptance(S, L, settings, controller.state)
                for row, chosen in enumerate((inside, np.full_like(inside, True))):
                    counts[row] += np.bincount(length_bin(torch.from_numpy(L[chosen])).numpy(), minlength=K)
            controller.update([sums_of_log_ratios(*part) for part in parts])
        starts = equal_mass_starts(counts[1], 8)
        accepted, total = (merge_bins(row, starts) for row in counts)
        errors[band] = length_reweighting_error(accepted, total).debiased.value
        rates[band] = accepted.sum() / total.sum()
    assert rates["quantile"] == pytest.approx(target, abs=0.02)
    assert errors["quantile"] <= 0.01 < 0.02 < errors["sqrt"]


def moved(n: int, seed: int, mean: float = 0.05, sigma: float = 0.01) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """S, L and A of leans with one mean at every length and a dispersion that grows like sqrt(L); A = 0 in a third."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(0, np.log(400), n)).astype(np.int64)
    advantage = rng.integers(-1, 2, n) * rng.uniform(0.1, 2.0, n)
    sign = np.where(advantage == 0, rng.choice([-1, 1], n), np.sign(advantage))
    return sign * (mean + sigma * np.sqrt(lengths) * rng.normal(size=n)), lengths, advantage


def active_round(seed: int, scale: float = 1.0, n: int = 300) -> tuple[list[SequenceSums], list[np.ndarray]]:
    batches = [moved(n, 10 * seed + i, 0.05 * scale * i / 3, 0.01 * scale * i / 3) for i in range(4)]
    return [sums_of_log_ratios(S, L) for S, L, _ in batches], [leans(*batch) for batch in batches]


@pytest.mark.parametrize("target", [0.5, 0.85, 0.95])
def test_active_line_removes_the_target_share_without_correlation_with_sqrt_length(target: float) -> None:
    found = leans(*moved(3000, 0))
    line = active_line(found, target)
    assert line is not None and min(line) > 0
    U, root = found[:, 0], np.sqrt(found[:, 1])
    removed = line[0] + line[1] * root < U
    # Exact up to the two sequences that lie on the line.
    assert abs(removed.sum() - (1 - target) * U.size) <= 2
    assert abs((root * (removed - (1 - target))).sum()) <= 2 * root.max()
    if target == 0.85:
        assert line == pytest.approx((0.05, 1.0364 * 0.01), abs=0.004)  # mean + q sigma sqrt(L)


def test_active_line_lies_between_the_constant_and_the_sqrt_band() -> None:
    rng = np.random.default_rng(0)
    L = rng.integers(1, 400, 4000)
    noise = np.abs(rng.normal(size=L.size))
    constant, slope = active_line(np.stack([0.1 * noise, L], axis=1), 0.9) or (0, 0)
    assert constant == pytest.approx(0.1645, abs=0.01) and slope == pytest.approx(0, abs=1e-3)
    constant, slope = active_line(np.stack([0.03 * noise * np.sqrt(L), L], axis=1), 0.9) or (0, 0)
    assert constant == pytest.approx(0, abs=0.03) and slope == pytest.approx(0.0493, abs=3e-3)
    # A faster growth would ask for a negative constant, a fall with length for a negative slope.
    constant, slope = active_line(np.stack([0.01 * noise * L, L], axis=1), 0.9) or (1, 0)
    assert constant == pytest.approx(0, abs=1e-9) and slope > 0
    constant, slope = active_line(np.stack([noise / L, L], axis=1), 0.9) or (0, 1)
    assert constant > 0 and slope == pytest.approx(0, abs=1e-9)


def test_no_active_line_without_enough_leans_or_without_movement() -> None:
    found = leans(*moved(3000, 0))
    assert active_line(found[:19], 0.85) is None
    assert active_line(found * [0, 1], 0.85) is None
    assert active_line(found * [-1, 1], 0.05) is None  # nearly all leans are negative


def test_sequences_without_advantage_take_no_part_in_the_active_band() -> None:
    S, L, A = moved(3000, 0)
    wild = np.where(A == 0, 100 * S, S)
    np.testing.assert_array_equal(leans(wild, L, A), leans(S, L, A))
    assert len(leans(S, L, A)) == (A != 0).sum() < S.size


def test_active_band_is_causal_forgets_and_leaves_the_first_mini_batch_out() -> None:
    controller = BandController(ACTIVE, window=2)
    assert controller.state.active_line is None
    sums_of, leans_of = active_round(1)
    first = controller.update(sums_of, [leans(*moved(300, 99, 5.0)), *leans_of[1:]])
    assert first == BandController(ACTIVE).update(sums_of, leans_of)
    assert controller.state is first
    controller.update(*active_round(2, scale=20))
    controller.update(*active_round(3))
    clean = BandController(ACTIVE, window=2)
    clean.update(*active_round(3))
    assert controller.update(*active_round(4)) == clean.update(*active_round(4))


def test_active_band_continues_bit_for_bit_from_a_checkpoint() -> None:
    controller = BandController(ACTIVE, window=3)
    for seed in range(4):
        controller.update(*active_round(seed))
    saved = pickle.loads(pickle.dumps(controller.state_dict()))
    restored = BandController(ACTIVE, window=3)
    restored.load_state_dict(saved)
    assert restored.state == controller.state and restored.state.active_line is not None
    assert restored.update(*active_round(9)) == controller.update(*active_round(9))
    for batch in saved["rounds"]:  # a checkpoint from before there was this band
        del batch["leans_N2"]
    old = BandController(ACTIVE)
    old.load_state_dict(saved)
    assert old.state.active_line is None


def test_active_band_is_flat_by_what_the_clip_removes_where_the_others_are_not() -> None:
    """Applied causally to leans of one mean and a dispersion like sqrt(L), which the sqrt band clips when short."""
    controller = BandController(ACTIVE, window=3)
    kept: dict[str, np.ndarray] = {name: np.zeros((2, K)) for name in ("active", "sqrt", "constant")}
    fixed = {
        "sqrt": SequenceLossSettings(clip_low=0.021, clip_high=0.021),
        "constant": SequenceLossSettings(band="constant", clip_low=0.15, clip_high=0.176),
    }
    for number in range(60):
        batches = [moved(800, 1000 * number + i) for i in range(3)]
        for S, L, A in batches[1:] if number >= 3 else []:
            for name, settings in {"active": ACTIVE, **fixed}.items():
                upper = acceptance_band(torch.from_numpy(L), settings, controller.state, torch.float64)[2].numpy()
                keep = np.sign(A) * S <= upper
                for row, chosen in enumerate((keep & (A != 0), A != 0)):
                    kept[name][row] += np.bincount(length_bin(torch.from_numpy(L[chosen])).numpy(), minlength=K)
        controller.update([sums_of_log_ratios(S, L) for S, L, _ in batches], [leans(*batch) for batch in batches])
    starts = equal_mass_starts(kept["active"][1], 8)
    errors = {name: length_reweighting_error(*merge_bins(rows, starts)) for name, rows in kept.items()}
    assert errors["active"].rate == pytest.approx(0.85, abs=0.01)
    assert errors["active"].debiased.value <= 0.01 < 0.05 < errors["constant"].debiased.value
    assert errors["sqrt"].debiased.value > 0.1
