"""Settings of the losses are refused by key and value; tests/promises/test_formulas.py holds the rest."""

from __future__ import annotations

import math

import pytest

from fspo.losses import ALGORITHMS, resolve_settings
from fspo.types import SequenceLossSettings, eps_of_c, shape, unit_of


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("exponent", -0.1), ("exponent", math.nan), ("c_low", -0.1), ("c_high", math.nan), ("c_high", math.inf)),
        *(("grad_multiplier", 0.0), ("grad_multiplier", math.inf), ("s_max", 0.0), ("s_max", 100.0)),
        *(("drift", "k3"), ("weight", "token"), ("grad_scale", "L")),
    ],
)
def test_bad_settings_are_refused_by_key_and_value(key: str, value: object) -> None:
    for make in (SequenceLossSettings, lambda **given: resolve_settings({"loss_mode": "fspo", **given})):
        with pytest.raises(ValueError, match=f"^{key}={value!r} "):
            make(**{key: value})


def test_a_state_is_needed_where_the_drift_is_measured() -> None:
    assert [name for name, loss in ALGORITHMS.items() if loss.needs_state] == ["fspo_v1"]


def test_exponents_with_a_name_have_it() -> None:
    assert [shape(exponent) for exponent in (0, 0.43, 0.5, 1)] == ["constant", "L^0.43", "sqrt(L)", "linear"]
    assert [unit_of(exponent) for exponent in (0, 0.43, 0.5, 1)] == [
        *("nats", "nats per token^0.43", "nats per sqrt(token)", "nats per token"),
    ]
    assert eps_of_c(1e9, 1e9) == (1.0, math.inf), "no clip"
