"""Golden trajectories: no loss changes unnoticed. `python -m benchmarks.golden --write` records a wanted change."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import golden
from fspo.losses import ALGORITHMS

pytestmark = pytest.mark.promise(2)
RECORDED = json.loads(golden.RECORD.read_text(encoding="utf-8"))


def test_every_loss_moves_as_recorded() -> None:
    assert golden.differences(RECORDED, golden.trajectories()) == []


@pytest.mark.parametrize(
    "change", [{"c_high": 0.0301}, {"c_low": 0.0301}, {"grad_multiplier": 1.000001}, {"drift": "kl"}]
)
def test_a_small_change_is_noticed(change: dict[str, object]) -> None:
    settings = dataclasses.replace(ALGORITHMS["fspo"], **change)
    assert golden.differences({"fspo": RECORDED["fspo"]}, {"fspo": golden.trajectory(settings)})
