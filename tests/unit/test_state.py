"""What this recipe adds to a checkpoint: saved, restored, refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from batches import loss_output, responses_of

from fspo.calibration import DriftMeasurement
from fspo.responses import Responses
from recipe.fspo.accounting.funnel import LengthFunnel
from recipe.fspo.state import STATE_FILE, load_state, save_state


class Pickled:
    """What runs code where a pickle is loaded as one."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("pwned",)


def test_our_own_state_is_loaded_without_running_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"random": Pickled()}, tmp_path / STATE_FILE)
    with pytest.raises(ValueError, match=STATE_FILE):
        load_state(tmp_path, {})
    assert not (tmp_path / "pwned").exists()


def responses(seed: int) -> Responses:
    return responses_of(*(loss_output(4, 8, seed=one) for one in (seed, seed + 10)))


def test_trainer_state_survives_a_restart(tmp_path: Path) -> None:
    drift, restored = DriftMeasurement(window=2), DriftMeasurement(window=2)
    for step in range(3):
        drift.update(responses(step))
    save_state(tmp_path, {"band_controller": drift})
    load_state(tmp_path, {"band_controller": restored})
    assert restored.state == drift.state
    assert restored.update(responses(5)) == drift.update(responses(5))


def test_damaged_or_foreign_trainer_state_is_refused(tmp_path: Path) -> None:
    fixed = {"funnel": LengthFunnel(), "band_controller": None}
    load_state(tmp_path, fixed)  # a checkpoint of plain verl has no such file
    save_state(tmp_path, fixed)
    with pytest.raises(ValueError, match="band_controller"):
        load_state(tmp_path, fixed | {"band_controller": DriftMeasurement()})
    (tmp_path / STATE_FILE).write_bytes((tmp_path / STATE_FILE).read_bytes()[:100])
    with pytest.raises(ValueError, match=STATE_FILE):
        load_state(tmp_path, fixed)
