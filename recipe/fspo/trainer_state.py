"""What this recipe adds to verl's checkpoint: the window of statistics, the bands' state and the random states."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from fspo.calibration import BandController
from fspo.data.io import atomic_path
from fspo.diagnostics import LengthDiagnostics

STATE_FILE = "fspo_state.pt"


def save_state(folder: Path, diagnostics: LengthDiagnostics, band_controller: BandController | None) -> None:
    """Write ``fspo_state.pt`` into a checkpoint folder, under a temporary name first."""
    state = {
        "diagnostics": diagnostics.state_dict(),
        "band_controller": None if band_controller is None else band_controller.state_dict(),
        "random": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
    }
    with atomic_path(folder / STATE_FILE) as temporary:
        torch.save(state, temporary)


def load_state(folder: Path, diagnostics: LengthDiagnostics, band_controller: BandController | None) -> None:
    """Restore what :func:`save_state` wrote, in place.

    Raises:
        ValueError: if the file is damaged, or was written by a run with another kind of band.
    """
    path = folder / STATE_FILE
    if not path.exists():
        # A checkpoint of plain verl: the weights are good, the statistics begin afresh.
        return
    try:
        # weights_only=False: random states and sums are plain objects, and the file is this run's own.
        state = torch.load(path, weights_only=False)
    except Exception as error:
        raise ValueError(
            f"{path} is damaged ({error}): resume from an older checkpoint with trainer.resume_mode=resume_path "
            "trainer.resume_from_path=.../global_step_N, or delete this file to begin the statistics afresh"
        ) from error
    if (state["band_controller"] is None) != (band_controller is None):
        raise ValueError(
            f"{path} was saved with {'a fixed' if state['band_controller'] is None else 'a calibrated'} band, this run "
            "has the other kind: resume with the same algo, or delete the file to begin the calibration afresh"
        )
    diagnostics.load_state_dict(state["diagnostics"])
    if band_controller is not None:
        band_controller.load_state_dict(state["band_controller"])
    random.setstate(state["random"]["python"])
    np.random.set_state(state["random"]["numpy"])
    torch.set_rng_state(state["random"]["torch"])
