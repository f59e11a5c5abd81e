"""The sqrt rule of the rollout correction, as verl reaches it in a run of this recipe."""

from __future__ import annotations

import pytest
import torch
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import rollout_corr_helper as helper

import recipe.fspo.sqrt_rejection  # noqa: F401  (adds the rule; in a run the checks and the worker import it)

RULE = "seq_sqrt_k1"


def responses(lengths: torch.Tensor, sigma: float = 0.03) -> tuple[torch.Tensor, torch.Tensor]:
    """Independent token log-ratios, and the mask; 0.5 stands in the padding."""
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    noise = sigma * torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    return torch.where(mask > 0, noise, 0.5), mask


def kept(rule: str, threshold: str | float, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs=rule, rollout_rs_threshold=threshold)
    rules = {"rollout_rs": config.rollout_rs, "rollout_rs_threshold": config.rollout_rs_threshold}
    _, mask_after, metrics = helper.compute_rollout_correction_and_rejection_mask(
        log_ratio, torch.zeros_like(log_ratio), mask, None, **rules
    )
    kept_B = (mask_after.sum(-1) == mask.sum(-1)) & (mask.sum(-1) > 0)
    assert torch.equal(mask_after.sum(-1) > 0, kept_B)  # whole responses
    removed = 1 - float(mask_after.sum() / mask.sum())
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(removed, abs=1e-6)
    assert f"rollout_corr/rollout_rs_{rule}_seq_masked_fraction" in metrics
    return kept_B


def test_at_one_length_it_is_the_sum_rule_of_scaled_thresholds() -> None:
    log_ratio, mask = responses(torch.full((4096,), 100))
    ours = kept(RULE, "0.96_1.02", log_ratio, mask)
    theirs = kept("seq_sum_k1", f"{0.96**10}_{1.02**10}", log_ratio, mask)
    assert torch.equal(ours, theirs) and 0.2 < float(ours.double().mean()) < 0.8


def test_it_keeps_the_same_share_at_every_length() -> None:
    lengths = torch.tensor([16, 64, 256, 1024]).repeat_interleave(4096)
    log_ratio, mask = responses(lengths)
    share = kept(RULE, 1.03, log_ratio, mask).view(4, -1).double().mean(1)
    torch.testing.assert_close(share, torch.full_like(share, 0.675), atol=0.03, rtol=0)  # P(|z| < log(1.03) / 0.03)
    by_sum = kept("seq_sum_k1", 1.3, log_ratio, mask).view(4, -1).double().mean(1)
    assert float(by_sum[0] - by_sum[-1]) > 0.5


def test_a_wrong_threshold_names_the_rule() -> None:
    for threshold in ("1.1,1.2", "1.1_x", None):
        with pytest.raises(ValueError, match=f"{RULE}, rollout_rs_threshold={threshold}: "):
            helper.compute_rollout_rejection_mask(*responses(torch.tensor([4])), RULE, threshold)
