"""Bands and settings: formulas, units, validation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fspo.clipping import acceptance_band
from fspo.losses import ALGORITHMS
from fspo.sums import FINE_LENGTH_EDGES, length_bin
from fspo.types import BandState, SequenceLossSettings

F64 = torch.float64
K = FINE_LENGTH_EDGES.numel() - 1


def band(length: int, loss: SequenceLossSettings, state: BandState | None = None) -> tuple[float, float, float]:
    centre, lower, upper = acceptance_band(torch.tensor([length]), loss, state, F64)
    return float(centre), float(lower), float(upper)


@pytest.mark.parametrize("length", [1, 7, 1024, 32768])
def test_bands_are_the_published_formulas(length: int) -> None:
    sqrt = SequenceLossSettings(band="sqrt", clip_low=0.03, clip_high=0.05)
    assert band(length, sqrt) == pytest.approx((0, -0.03 * math.sqrt(length), 0.05 * math.sqrt(length)), rel=1e-12)
    constant = SequenceLossSettings(band="constant", clip_low=0.2, clip_high=0.28)
    assert band(length, constant) == pytest.approx((0, math.log(0.8), math.log(1.28)), rel=1e-12)
    linear = SequenceLossSettings(band="linear", clip_low=3e-4, clip_high=4e-4)
    expected = (0, length * math.log(1 - 3e-4), length * math.log(1 + 4e-4))
    assert band(length, linear) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("first", "second", "side", "crossing"),
    [
        ("fspo", "seq_gspo", 1, 10_000),
        ("fspo", "seq_gspo", 2, 5_625),
        ("fspo", "seq_rloo", 1, 55),
        ("fspo", "seq_rloo", 2, 37),
    ],
)
def test_default_bands_cross_where_the_clip_values_say(first: str, second: str, side: int, crossing: int) -> None:
    def gap(length: int) -> float:
        return abs(band(length, ALGORITHMS[first])[side]) - abs(band(length, ALGORITHMS[second])[side])

    assert gap(round(crossing * 0.97)) * gap(round(crossing * 1.03)) < 0


def test_active_band_is_a_line_in_sqrt_length_once_measured() -> None:
    loss = SequenceLossSettings(band="active", clip_low=0.01, clip_high=0.02, target_acceptance=0.85)
    assert band(100, loss) == band(100, loss, BandState()) == pytest.approx((0, -0.1, 0.2))
    assert band(100, loss, BandState(active_line=(0.07, 0.003))) == pytest.approx((0, -0.1, 0.1))


@pytest.mark.parametrize("kind", ["constant", "sqrt", "linear"])
def test_drift_moves_the_whole_band_and_only_when_asked(kind: str) -> None:
    base = SequenceLossSettings(band=kind, clip_low=0.02, clip_high=0.03)
    moved = dataclasses.replace(base, drift="kl")
    state = BandState(drift_per_token=1e-3)
    assert band(500, base, state) == band(500, base)
    assert band(500, moved, state) == pytest.approx(tuple(x - 0.5 for x in band(500, base)), abs=1e-12)
    assert band(500, moved) == band(500, base)  # no data yet


def test_quantile_band_looks_its_width_up_by_fine_bin() -> None:
    loss = SequenceLossSettings(band="quantile", clip_low=0.01, clip_high=0.02, target_acceptance=0.85)
    widths = tuple(0.01 + 1e-4 * k for k in range(K))
    lengths = torch.tensor([1, 2, 16, 17, 100, 131_071, 131_072, 10**7])
    _, lower, upper = acceptance_band(lengths, loss, BandState(half_width_K=widths), F64)
    expected = torch.tensor(widths, dtype=F64)[length_bin(lengths)] * lengths.double().sqrt()
    torch.testing.assert_close(upper, expected)
    torch.testing.assert_close(lower, -expected)
    assert band(100, loss) == pytest.approx((0, -0.1, 0.2))


@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    length=st.integers(1, 200_000),
    drift=st.floats(0, 0.1),
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
)
@settings(max_examples=100)
def test_centre_lies_inside_every_band(name: str, length: int, drift: float, low: float, high: float) -> None:
    loss = dataclasses.replace(ALGORITHMS[name], clip_low=low, clip_high=high)
    loss = dataclasses.replace(loss, drift="none" if loss.band == "active" else "kl")
    state = BandState(drift_per_token=drift, half_width_K=(0.03,) * K, active_line=(0.0, 0.02))
    centre, lower, upper = band(length, loss, state)
    assert lower <= centre <= upper


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"band": "root"}, r"band='root'.*'sqrt'"),
        ({"drift": "k3"}, r"drift='k3'.*'kl'"),
        ({"weight": "token"}, r"weight='token'"),
        ({"grad_scale": "L"}, r"grad_scale='L'"),
        ({"clip_low": -0.1}, r"clip_low=-0.1"),
        ({"clip_high": math.nan}, r"clip_high=nan"),
        ({"clip_high": math.inf}, r"clip_high=inf"),
        ({"band": "constant", "clip_low": 1.0}, r"clip_low=1.0.*below 1"),
        ({"grad_multiplier": 0.0}, r"grad_multiplier=0.0"),
        ({"s_max": 0.0}, r"s_max=0.0"),
        ({"s_max": 100.0}, r"s_max=100.0"),
        ({"target_acceptance": 0.85}, r"target_acceptance=0.85 has no effect with band='sqrt'; choose a loss"),
        ({"band": "active", "target_acceptance": 0.85, "drift": "kl"}, r"drift='kl' moves .*drift to 'none'"),
        ({"band": "active"}, r"target_acceptance=None.*between 0 and 1"),
        ({"band": "quantile", "target_acceptance": 1.0}, r"target_acceptance=1.0"),
    ],
)
def test_bad_settings_are_refused_by_key_and_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceLossSettings(**change)  # type: ignore[arg-type]


def test_state_by_position_in_the_round() -> None:
    state = BandState(drift_per_token=2e-3, drift_by_mini_batch=(0.0, 1e-3, 4e-3), active_line=(0.1, 0.2))
    assert [state.at_mini_batch(i).drift_per_token for i in (0, 1, 2, 9)] == [0.0, 1e-3, 4e-3, 4e-3]
    assert state.at_mini_batch(1).active_line == (0.1, 0.2)
    assert BandState(drift_per_token=2e-3).at_mini_batch(3).drift_per_token == 2e-3
    with pytest.raises(ValueError, match="index=-1"):
        state.at_mini_batch(-1)


def test_which_settings_need_a_state() -> None:
    assert {name for name, loss in ALGORITHMS.items() if loss.needs_state} == {
        "fspo_v1",
        "fspo_quantile",
        "fspo_active",
    }
