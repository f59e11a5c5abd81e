"""The public functions that these tests use, imported in one place: where one moves, a line changes here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fspo.acceptance import kept_output
from fspo.audit import Audit
from fspo.calibration import DriftMeasurement
from fspo.clip import ClipMeasurement, needed_scale, scale_for
from fspo.conclusion import even_band, exponent_of, rounding_share
from fspo.fairness.lre import length_reweighting_error
from fspo.files import read_steps as _read_steps
from fspo.losses import ALGORITHMS, UnusableRowsError, acceptance_band, judged, resolve_settings, sequence_policy_loss
from fspo.responses import Responses
from fspo.table import read_table
from fspo.types import BandState, SequenceLossOutput, SequenceLossSettings, c_of_eps, eps_of_c
from recipe.runner.progress import append_records

__all__ = [
    "ALGORITHMS",
    "Audit",
    "BandState",
    "ClipMeasurement",
    "Responses",
    "SequenceLossOutput",
    "SequenceLossSettings",
    "UnusableRowsError",
    "acceptance_band",
    "append_records",
    "c_of_eps",
    "eps_of_c",
    "even_band",
    "exponent_of",
    "judged",
    "kept_output",
    "length_reweighting_error",
    "needed_scale",
    "read_table",
    "resolve_settings",
    "rounding_share",
    "scale_for",
    "sequence_policy_loss",
]

#: The losses of the family, by what follows ``loss_mode=``; the drift of the second is measured.
NAMES = ("fspo", "fspo_v1", "seq_rloo", "seq_gspo", "luspo")


def drift_measurement() -> Any:
    """What a run measures the drift of ``fspo_v1`` with: ``update(responses)``, ``state``, ``state_dict()``."""
    return DriftMeasurement()


def read_steps(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of a run's steps that count, and what is wrong with the file."""
    problems: list[str] = []
    return _read_steps(path, problems), problems


def write_steps(path: Path, *steps: int, **values: float) -> None:
    """Metrics of steps, as a run appends them."""
    for step in steps:
        append_records(path, [{"step": step, "metrics": values}])


def run_json(algo: str, seed: int) -> str:
    """``run.json`` of a run that has finished."""
    settings = ALGORITHMS[algo]
    loss = {"loss_mode": algo, "c_low": settings.c_low, "c_high": settings.c_high}
    return json.dumps({"algo": algo.removeprefix("seq_"), "seed": seed, "status": "finished", "loss": loss})


def gradient_of(loss: Callable[..., torch.Tensor], log_prob_BT: torch.Tensor, *others: Any) -> torch.Tensor:
    """The gradient of a scalar loss with respect to its first argument."""
    log_prob_BT = log_prob_BT.detach().requires_grad_()
    return torch.autograd.grad(loss(log_prob_BT, *others), log_prob_BT)[0]


Rows = Mapping[str, Any]
