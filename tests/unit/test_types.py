"""Settings of the losses."""

from __future__ import annotations

import math

import pytest

from fspo.types import SequenceLossSettings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"band": "root"}, r"band='root'.*'sqrt'"),
        ({"drift": "k3"}, r"drift='k3'.*'kl'"),
        ({"weight": "token"}, r"weight='token'.*'sequence'"),
        ({"grad_scale": "L"}, r"grad_scale='L'.*'1/L'"),
        ({"clip_low": -0.1}, r"clip_low=-0.1"),
        ({"clip_high": math.nan}, r"clip_high=nan"),
        ({"clip_high": math.inf}, r"clip_high=inf"),
        ({"band": "constant", "clip_low": 1.0}, r"clip_low=1.0.* 1 "),
        ({"grad_multiplier": 0.0}, r"grad_multiplier=0.0"),
        ({"s_max": 0.0}, r"s_max=0.0"),
        ({"s_max": 100.0}, r"s_max=100.0.* 80"),
        ({"target_acceptance": 0.85}, r"target_acceptance=0.85.*band='sqrt'.*band=quantile"),
        ({"band": "quantile"}, r"target_acceptance=None.*0.85"),
        ({"band": "active", "target_acceptance": 0.85}, r"band='active'.*'quantile'"),
        ({"band": "quantile", "target_acceptance": 1.0}, r"target_acceptance=1.0"),
        ({"band": "quantile", "target_acceptance": 0.85, "drift": "kl"}, r"drift='kl'.*band='quantile'.*'none'"),
    ],
)
def test_bad_settings_are_refused_by_key_and_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceLossSettings(**change)  # type: ignore[arg-type]
