"""Settings of the losses."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import holds

from fspo.losses import ALGORITHMS, resolve_settings
from fspo.types import SequenceLossSettings, c_of_eps, eps_of_c, shape, unit_of


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"band": "root"}, r"band='root'.*'power'"),
        ({"band": "sqrt"}, r"band='sqrt'.*'power'.*exponent=0.5"),
        ({"exponent": -0.1}, r"exponent=-0.1.* 0 to 2"),
        ({"exponent": 2.1}, r"exponent=2.1.* 0 to 2"),
        ({"exponent": math.nan}, r"exponent=nan.* 0 to 2"),
        ({"drift": "k3"}, r"drift='k3'.*'kl'"),
        ({"weight": "token"}, r"weight='token'.*'sequence'"),
        ({"grad_scale": "L"}, r"grad_scale='L'.*'1/L'"),
        ({"c_low": -0.1}, r"c_low=-0.1"),
        ({"c_high": math.nan}, r"c_high=nan"),
        ({"c_high": math.inf}, r"c_high=inf"),
        ({"grad_multiplier": 0.0}, r"grad_multiplier=0.0"),
        ({"s_max": 0.0}, r"s_max=0.0"),
        ({"s_max": 100.0}, r"s_max=100.0.* 80"),
        ({"target_acceptance": 0.85}, r"target_acceptance=0.85.*band='power'.*band='quantile'"),
        ({"band": "quantile"}, r"target_acceptance=None.*0.85"),
        ({"band": "active", "target_acceptance": 0.85}, r"band='active'.*'quantile'"),
        ({"band": "quantile", "target_acceptance": 1.0}, r"target_acceptance=1.0"),
        ({"band": "quantile", "target_acceptance": 0.85, "drift": "kl"}, r"drift='kl'.*band='quantile'.*'none'"),
    ],
)
def test_bad_settings_are_refused_by_key_and_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceLossSettings(**change)  # type: ignore[arg-type]


@given(st.floats(0, 0.999), st.floats(0, 100))
def test_eps_and_nats_are_converted_by_side_and_back(eps_low: float, eps_high: float) -> None:
    c_low, c_high = c_of_eps(eps_low, eps_high)
    assert math.exp(-c_low) == pytest.approx(1 - eps_low, rel=1e-12)
    assert math.exp(c_high) == pytest.approx(1 + eps_high, rel=1e-12)
    assert eps_of_c(c_low, c_high) == pytest.approx((eps_low, eps_high), rel=1e-9, abs=1e-15)


def test_an_eps_that_bounds_no_ratio_is_refused_and_a_wide_band_has_an_infinite_one() -> None:
    assert c_of_eps(0.2, 0.2) == pytest.approx((0.22314355, 0.18232156))
    for eps, key in (((1.0, 0.2), "eps_low=1.0"), ((-0.1, 0.2), "eps_low=-0.1"), ((0.2, math.inf), "eps_high=inf")):
        with pytest.raises(ValueError, match=key):
            c_of_eps(*eps)
    assert eps_of_c(1e9, 1e9) == (1.0, math.inf)


#: Former clip values with what they are in nats: eps for RLOO, GSPO and LUSPO, by side; nats already for FSPO.
FORMER = [
    ("seq_rloo", {"clip_low": 0.2}, ("clip_low=0.2 ", "c_low=0.223144")),
    ("seq_rloo", {"clip_high": 0.2}, ("clip_high=0.2 ", "c_high=0.182322")),
    ("seq_gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, ("clip_low=0.0003", "c_low=0.000300045 c_high=0.00039992")),
    ("luspo", {"clip_high": 0.5}, ("clip_high=0.5 ", "c_high=0.405465")),
    ("fspo", {"clip_low": 0.03}, ("clip_low=0.03 ", "c_low=0.03")),
    ("fspo_v1", {"clip_low": 0.2}, ("clip_low=0.2 ", "c_low=0.2")),
    ("fspo_quantile", {"clip_high": 0.04}, ("clip_high=0.04 ", "c_high=0.04")),
    ("seq_rloo", {"clip_low": 1.5}, ("clip_low=1.5 ", "c_low")),
    ("fspo", {"clip_low": "much"}, ("clip_low=much ", "c_low")),
]


@pytest.mark.parametrize(("loss", "clips", "says"), FORMER)
def test_former_clip_values_are_refused_with_their_value_in_nats(
    loss: str, clips: dict[str, object], says: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=holds(*says)):
        dataclasses.replace(ALGORITHMS[loss], **clips)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=holds(*says)):
        resolve_settings({"loss_mode": loss, "exponent": 0.43, **clips})
    assert resolve_settings({"loss_mode": loss, "clip_low": None}) == ALGORITHMS[loss]


def test_a_former_clip_value_has_the_unit_of_the_band_beside_it() -> None:
    """GSPO's weight with FSPO's band, as a command of before has it."""
    with pytest.raises(ValueError, match=holds("clip_low=0.03 ", "exponent=0.5 c_low=0.03")):
        resolve_settings({"loss_mode": "seq_gspo", "band": "sqrt", "clip_low": 0.03})


def test_exponents_with_a_name_have_it() -> None:
    assert [shape(exponent) for exponent in (0, 0.43, 0.5, 1)] == ["constant", "L^0.43", "sqrt(L)", "linear"]
    assert [unit_of(exponent) for exponent in (0, 0.43, 0.5, 1)] == [
        *("nats", "nats per token^0.43", "nats per sqrt(token)", "nats per token"),
    ]
