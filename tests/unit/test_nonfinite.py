"""An update without a finite gradient stops the run and leaves the batch behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from messages import holds

from fspo.losses import ALGORITHMS, UnusableRowsError, sequence_policy_loss
from recipe.runner.faults.nonfinite import UpdateRefused, guarded_update


def mini_batch(bad: bool) -> dict[str, object]:
    advantages = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    if bad:
        advantages.values()[1] = float("nan")
    return {"advantages": advantages, "input_ids": torch.arange(5), "note": "not a tensor"}


def update(grad_norm: float | None, bad: bool, folder: Path | None, rank: int = 0) -> None:
    with guarded_update(mini_batch(bad), folder, rank, UnusableRowsError) as metrics:
        if grad_norm is not None:
            metrics["grad_norm"] = grad_norm


def test_a_finite_gradient_passes_and_writes_nothing(tmp_path: Path) -> None:
    update(1e30, True, tmp_path)
    update(None, True, tmp_path)
    with guarded_update({}, tmp_path, 0, ValueError, may_skip=True) as metrics:  # as a gradient scaler may
        metrics["grad_norm"] = float("inf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_the_batch_is_saved_and_what_is_not_finite_is_named(tmp_path: Path, norm: float) -> None:
    with pytest.raises(UpdateRefused, match=holds(str(norm), "advantages", f"{tmp_path}/bad_batch_rank1.pt")):
        update(norm, True, tmp_path, rank=1)
    saved = torch.load(tmp_path / "bad_batch_rank1.pt", weights_only=False)
    assert sorted(saved) == ["advantages", "input_ids"]
    assert torch.isnan(saved["advantages"].values()).sum() == 1
    # So is what the loss refuses.
    ones, said = torch.ones(2, 3), holds("row 0 ", "advantages_BT", f"{tmp_path}/bad_batch_rank0.pt")
    guarded = guarded_update(mini_batch(bad=True), tmp_path, 0, UnusableRowsError)
    with pytest.raises(UpdateRefused, match=said), guarded:
        sequence_policy_loss(-ones, -ones, ones * float("nan"), ones, ALGORITHMS["fspo"])
    assert (tmp_path / "bad_batch_rank0.pt").is_file()
