"""Golden trajectories: no loss changes unnoticed. `python -m benchmarks.golden --write` records a wanted change."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import golden
from fspo.losses import ALGORITHMS


def test_every_loss_moves_as_recorded() -> None:
    recorded = json.loads(golden.RECORD.read_text(encoding="utf-8"))
    assert golden.differences(recorded, golden.trajectories()) == []


@pytest.mark.parametrize("change", [{"clip_high": 0.0301}, {"grad_multiplier": 1.000001}, {"drift": "kl"}])
def test_a_small_change_is_noticed(change: dict[str, object]) -> None:
    recorded = json.loads(golden.RECORD.read_text(encoding="utf-8"))
    settings = dataclasses.replace(ALGORITHMS["fspo"], **change)
    rows = golden.differences({"fspo": recorded["fspo"]}, {"fspo": golden.trajectory(settings)})
    assert rows


def test_every_branch_of_the_loss_is_taken() -> None:
    recorded = json.loads(golden.RECORD.read_text(encoding="utf-8"))
    for variant, name in (
        ("fspo", "high"),
        ("fspo", "low"),
        ("seq_gspo", "high"),
        ("seq_rloo_guard", "overflow"),
        ("vespo", "high"),
        ("vespo", "low"),
        ("ctpo_la", "high"),
        ("ctpo_la", "low"),
        *((algo, side) for algo in golden.VERLS for side in ("high", "low")),
    ):
        assert sum(recorded[variant][name]) > 0, (variant, name)
