"""An update without a finite gradient stops the run and leaves the batch behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipe.fspo.guard import UpdateNotFinite, check_update


def mini_batch(bad: bool) -> dict[str, object]:
    advantages = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    if bad:
        advantages.values()[1] = float("nan")
    return {"advantages": advantages, "input_ids": torch.arange(5), "note": "not a tensor"}


def test_a_finite_gradient_passes_and_writes_nothing(tmp_path: Path) -> None:
    check_update({"grad_norm": 1e30}, mini_batch(bad=True), tmp_path, rank=0)
    check_update({}, mini_batch(bad=True), tmp_path, rank=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_the_batch_is_saved_and_what_is_not_finite_is_named(tmp_path: Path, norm: float) -> None:
    with pytest.raises(UpdateNotFinite, match=r"not finite in it: advantages\. .*bad_batch_rank1\.pt"):
        check_update({"grad_norm": norm}, mini_batch(bad=True), tmp_path, rank=1)
    saved = torch.load(tmp_path / "bad_batch_rank1.pt", weights_only=False)
    assert sorted(saved) == ["advantages", "input_ids"]
    assert torch.isnan(saved["advantages"].values()).sum() == 1


def test_finite_inputs_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UpdateNotFinite, match="inputs are all finite, so the loss overflowed"):
        check_update({"grad_norm": float("nan")}, mini_batch(bad=False), tmp_path, rank=0)


def test_without_a_folder_nothing_is_written() -> None:
    with pytest.raises(UpdateNotFinite) as error:
        check_update({"grad_norm": float("nan")}, mini_batch(bad=True), None, rank=0)
    assert "saved" not in str(error.value)
