"""Validation metrics: the expectations that verl estimates by resampling, under verl's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from verl.trainer.ppo import metric_utils

from recipe.runner.verl_patches import validation

VALUES = {
    "right or wrong": [1.0, 0.0, 0.0, 1.0, 0.0],
    "all equal": [0.5] * 4,
    "lengths": [17, 3, 3, 900, 41, 2, 300],
    "booleans": [True, False, False],
}


def metrics(monkeypatch: pytest.MonkeyPatch, exact: bool, infos: dict[str, list[Any]], **options: Any) -> dict:
    monkeypatch.setattr(metric_utils, "bootstrap_metric", validation._RESAMPLED)
    if exact:
        validation.replace_resampling()
    responses = len(next(iter(infos.values())))
    problems = [f"problem {index // 4}" for index in range(responses)]
    return metric_utils.process_validation_metrics(["source"] * responses, problems, infos, **options)["source"]


@pytest.mark.parametrize("draws", [2, 3, 7])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_best_and_worst_are_what_a_long_bootstrap_tends_to(values: list[float], draws: int) -> None:
    samples = 400_000
    drawn = np.random.default_rng(1).choice(np.asarray(values, dtype=float), (samples, draws))
    exact = validation.best_and_worst(values, draws, [np.max, np.min], n_bootstrap=1000, seed=42)
    for (mean, std), extremes in zip(exact, (drawn.max(axis=1), drawn.min(axis=1)), strict=True):
        assert mean == pytest.approx(extremes.mean(), abs=5 * std / samples**0.5 + 1e-12)
        assert std == pytest.approx(extremes.std(), rel=0.02, abs=1e-7)


def test_every_name_is_verls_and_every_number_near_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = {
        "acc": [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        "response_length": [9, 8, 7, 6, 5, 4, 3, None],
        "status": ["wrong"] * 8,
        "pred": ["4", "4", "5", "6", "4", "7", "7", "7"],
    }
    resampled, exact = (metrics(monkeypatch, exact, infos) for exact in (False, True))
    assert {name: set(values) for name, values in exact.items()} == {
        name: set(values) for name, values in resampled.items()
    }
    assert {"mean@4", "std@4", "best@2/mean", "best@2/std", "worst@4/mean", "maj@4/mean"} <= set(exact["acc"])
    for name, values in resampled.items():
        for metric, number in values.items():
            same = metric.startswith(("mean", "std", "maj"))  # not resampled, or as by verl
            assert exact[name][metric] == (number if same else pytest.approx(number, abs=0.1)), (name, metric)


def test_missing_responses_count_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    source = metrics(monkeypatch, True, {"acc": [1.0, 1.0]}, expected_acc_counts={("source", "problem 0"): 4})
    assert source["acc"]["mean@4"] == 0.5
    assert source["acc"]["best@2/mean"] == pytest.approx(0.75)  # one of two draws from (1, 1, 0, 0) is right
    assert source["acc"]["worst@4/mean"] == pytest.approx(0.5**4)
    assert source["acc_success_only"]["mean@2"] == 1.0
