"""What verl's own worker, the same under an audit, and the recipe's do with one batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from updates import updates


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "vanilla"])
def test_an_audit_changes_no_weight_and_writes_the_rows(loss: str, tmp_path: Path) -> None:
    """The recipe's takes the log-probabilities of a pack in fewer calls on CPUs: equal but for rounding."""
    verl, audit, recipe = (updates(tmp_path, worker, loss)[0] for worker in ("verl", "audit", "recipe"))
    assert verl.pop("rows") == {} and {name: audit[name] for name in verl} == verl, "bit for bit"
    for name in ("loss", "grad_norm"):
        assert np.all(np.array(verl[name]) != 0)
        np.testing.assert_allclose(verl[name], recipe[name], rtol=1e-4, atol=1e-5, err_msg=name)
    change, other = np.array(verl["change"]), np.array(recipe["change"])  # Adam's, whose first step is nearly a sign
    assert np.linalg.norm(change) > 0 and np.linalg.norm(change - other) < 1e-2 * np.linalg.norm(change)
    rows, others = audit["rows"], recipe["rows"]
    assert rows.keys() >= {"S", "L", "A"} and len(rows["S"]) == 16
    for name in ("S", "L", "A"):
        np.testing.assert_allclose(sorted(rows[name]), sorted(others[name]), rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_both_commands_do_the_same_with_one_batch(tmp_path: Path) -> None:
    """In fp32 on one rank: loss, gradient, rows and the change of the weights, bit for bit."""
    recipe, plain = (updates(tmp_path, worker, "fspo") for worker in ("recipe", "plain"))
    assert recipe == plain
    (one,) = recipe
    assert len(one["rows"]["S"]) == 16 and all(np.array(one["grad_norm"]) > 0) and any(one["change"])
