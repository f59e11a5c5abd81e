"""Clip values for an acceptance-matched comparison, from the sequences that a pilot run recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from recipe.fspo.compare.losses import band_settings

from fspo.files import write_json
from fspo.matching import Sequences, match_clip, needed_factor
from fspo.records import read_sequences

#: By comparison: where an algorithm's clip values are.
CALIBRATION_FILES: Final = {"matched": "calibration.json", "matched_active": "calibration_active.json"}
#: A band that could be a thousand times as narrow without clipping anything is none, and is not matched (unclipped).
_NO_BAND: Final = 1e-3
_POLICY_LOSS: Final = "actor_rollout_ref.actor.policy_loss"


def recorded_sequences(run: Path, with_advantages: bool = False) -> Sequences:
    """S and L, and A if asked, of a run's ``sequences.jsonl`` without the first mini-batch of each step, where S = 0.

    Raises:
        ValueError: if the run recorded none.
    """
    if (found := read_sequences(run)) is None:
        raise ValueError(f"{run} has no recorded sequences to calibrate on: run with fspo.record_sequences=true")
    return Sequences.from_pairs(*found.pooled(), np.concatenate(found.advantage) if with_advantages else None)


def calibrate(
    out: Path, pilot: str, algos: Sequence[str], overrides: Sequence[str], target_clip_rate: float, comparison: str
) -> dict[str, Any]:
    """Write the comparison's file: for each algorithm, the clip values that clip this share of the pilot's sequences.

    An existing file keeps its entries: runs made with them would otherwise be compared with runs made with others.

    Raises:
        BadInput: for a loss without a band of this library.
        ValueError: if the pilot recorded no sequences, or an algorithm's band cannot be scaled.
    """
    path = out / CALIBRATION_FILES[comparison]
    found: dict[str, Any] = {"pilot": pilot, "target_clip_rate": target_clip_rate, "algos": {}}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    missing = [algo for algo in algos if algo not in found["algos"]]
    if missing:
        sequences = recorded_sequences(out / found["pilot"], with_advantages=comparison == "matched_active")
        drift = max(0.0, -float(sequences.log_ratio_B.sum() / sequences.length_B.sum()))
        for algo in missing:
            settings = band_settings(algo, overrides)
            if not settings.calibrated and needed_factor(sequences, settings, drift).max() < _NO_BAND:
                found["algos"][algo] = {"overrides": [], "clip_rate_on_pilot": 0.0}
                continue
            matched = match_clip(sequences, settings, target_clip_rate, drift)
            names = ("clip_low", "clip_high", *(("target_acceptance",) if matched.settings.calibrated else ()))
            clips = [f"{_POLICY_LOSS}.{name}={getattr(matched.settings, name):.6g}" for name in names]
            found["algos"][algo] = {"overrides": clips, "clip_rate_on_pilot": matched.clip_rate}
        found["sequences"] = int(sequences.length_B.size)
        write_json(path, found)
    return found
