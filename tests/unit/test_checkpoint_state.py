"""What this recipe adds to a checkpoint: saved, restored, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from batches import loss_output, responses_of

from fspo.measured import DriftMeasurement
from recipe.fspo.checkpoint import load_state, save_state


def test_what_is_measured_survives_a_restart(tmp_path: Path) -> None:
    controller, restored = (DriftMeasurement() for _ in range(2))
    for step in range(3):
        controller.update(responses_of(*(loss_output(4, 8, seed=one) for one in (step, step + 10))))
    save_state(tmp_path, {"drift": controller})
    assert load_state(tmp_path, {"drift": restored}) == []
    assert restored.state == controller.state != DriftMeasurement().state


def test_a_part_that_only_one_of_both_has_is_refused(tmp_path: Path) -> None:
    assert load_state(tmp_path, {"drift": DriftMeasurement()}) == ["drift"], "verl's own trainer writes no such file"
    save_state(tmp_path, {})
    with pytest.raises(ValueError, match="drift"):
        load_state(tmp_path, {"drift": DriftMeasurement()})
