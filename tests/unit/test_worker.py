"""What verl's own worker, the same under an audit, and the recipe's do with one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from updates import updates

pytestmark = pytest.mark.slow
OF_VERL = ("gspo", "vanilla")
Updates = dict[str, Any]  # by loss


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Updates:
    """What the recipe's worker does, at last in verl's own command."""
    losses = (*OF_VERL, "fspo", "plain")
    return dict(zip(losses, updates(tmp_path_factory.mktemp("recipe"), "recipe", *losses), strict=True))


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """But for rounding."""
    for name in ("loss", "grad_norm"):
        assert np.all(np.array(one[name]) != 0)
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name)
    # Adam's, whose first step is nearly a sign
    change, of_other = np.array(one["change"]), np.array(other["change"])
    assert np.linalg.norm(change) > 0 and np.linalg.norm(change - of_other) < 1e-2 * np.linalg.norm(change)


def test_an_audit_changes_no_weight_and_writes_the_rows(recipe: Updates, tmp_path: Path) -> None:
    """The recipe's takes the log-probabilities of a pack in fewer calls on CPUs: equal but for rounding."""
    of_verl, audits = (updates(tmp_path, case, *OF_VERL) for case in ("verl", "audit"))
    for verl, audit, loss in zip(of_verl, audits, OF_VERL, strict=True):
        assert verl.pop("rows") == {} and all(audit[name] == verl[name] for name in verl), "bit for bit"
        assert_alike(audit, recipe[loss])
        assert len(audit["rows"]["S"]) == 16
        assert_same_rows(audit, recipe[loss])


def assert_same_rows(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("S", "L", "A"):
        rows, others = (sorted(update["rows"][name]) for update in (one, other))
        np.testing.assert_allclose(rows, others, rtol=1e-3, atol=1e-4, err_msg=name)


def test_both_commands_do_the_same_with_one_batch(recipe: Updates) -> None:
    """In fp32 on one rank: loss, gradient, rows and the change of the weights, bit for bit."""
    assert recipe["plain"] == recipe["fspo"] and recipe["fspo"]["momentum"] == [False, True]
    assert len(recipe["fspo"]["rows"]["S"]) == 16 and all(np.array(recipe["fspo"]["grad_norm"]) > 0)


def test_two_ranks_change_nothing_but_the_rounding(recipe: Updates, tmp_path: Path) -> None:
    (two,) = updates(tmp_path, "ranks", "fspo")
    assert_alike(recipe["fspo"], two)
    assert_same_rows(recipe["fspo"], two)
