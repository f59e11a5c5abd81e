"""The public functions that these tests use, imported in one place: where one moves, a line changes here."""

# ruff: noqa: F401
from __future__ import annotations

from pathlib import Path
from typing import Any

from fspo.audit import Audit
from fspo.clip_value import needed_scale, scale_for
from fspo.conclusion import even_band, exponent_of, rounding_share
from fspo.fairness.lre import length_reweighting_error
from fspo.files import read_steps as _read_steps
from fspo.kept import kept_output
from fspo.losses import ALGORITHMS, UnusableRowsError, acceptance_band, judged, resolve_settings, sequence_policy_loss
from fspo.measured import ClipMeasurement, DriftMeasurement
from fspo.responses import Responses
from fspo.table import read_table
from fspo.types import BandState, SequenceLossOutput, SequenceLossSettings, c_of_eps, eps_of_c
from recipe.runner.progress import append_records

#: The losses of the family, by what follows ``loss_mode=``; the drift of the second is measured.
NAMES = ("fspo", "fspo_v1", "seq_rloo", "seq_gspo", "luspo")


def read_steps(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of a run's steps that count, and what is wrong with the file."""
    problems: list[str] = []
    return _read_steps(path, problems), problems


def write_steps(path: Path, *steps: int, **values: float) -> None:
    """Metrics of steps, as a run appends them."""
    for step in steps:
        append_records(path, [{"step": step, "metrics": values}])
