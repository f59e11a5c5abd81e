"""What verl's own worker, the same under an audit, and the recipe's do with one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from updates import updates

pytestmark = pytest.mark.slow
LOSSES = ("gspo", "vanilla", "fspo")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the recipe's worker does, by loss."""
    return dict(zip(LOSSES, updates(tmp_path_factory.mktemp("recipe"), "recipe", *LOSSES), strict=True))


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(zip(LOSSES, updates(tmp_path_factory.mktemp("verl"), "verl", *LOSSES[:2]), strict=False))


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """But for rounding."""
    for name in ("loss", "grad_norm"):
        assert np.all(np.array(one[name]) != 0)
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name)
    # Adam's, whose first step is nearly a sign
    change, of_other = np.array(one["change"]), np.array(other["change"])
    assert np.linalg.norm(change) > 0 and np.linalg.norm(change - of_other) < 1e-2 * np.linalg.norm(change)


@pytest.mark.parametrize("loss", ["gspo", "vanilla"])
def test_an_audit_changes_no_weight_and_writes_the_rows(
    loss: str, recipe: dict[str, Any], verl: dict[str, Any], tmp_path: Path
) -> None:
    """The recipe's takes the log-probabilities of a pack in fewer calls on CPUs: equal but for rounding."""
    (audit,) = updates(tmp_path, "audit", loss)
    same = verl[loss].keys() - {"rows"}
    assert verl[loss]["rows"] == {} and all(audit[name] == verl[loss][name] for name in same), "bit for bit"
    assert_alike(audit, recipe[loss])
    assert audit["rows"].keys() >= {"S", "L", "A"} and len(audit["rows"]["S"]) == 16
    assert_same_rows(audit, recipe[loss])


def assert_same_rows(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("S", "L", "A"):
        rows, others = (sorted(update["rows"][name]) for update in (one, other))
        np.testing.assert_allclose(rows, others, rtol=1e-3, atol=1e-4, err_msg=name)


def test_both_commands_do_the_same_with_one_batch(recipe: dict[str, Any], tmp_path: Path) -> None:
    """In fp32 on one rank: loss, gradient, rows and the change of the weights, bit for bit."""
    assert updates(tmp_path, "plain", "fspo") == [recipe["fspo"]]
    assert len(recipe["fspo"]["rows"]["S"]) == 16 and all(np.array(recipe["fspo"]["grad_norm"]) > 0)


def test_two_ranks_change_nothing_but_the_rounding(recipe: dict[str, Any], tmp_path: Path) -> None:
    (two,) = updates(tmp_path, "ranks", "fspo")
    assert_alike(recipe["fspo"], two)
    assert_same_rows(recipe["fspo"], two)
