"""``seq_gspo`` against verl's own ``gspo``, on the same tensors with verl's aggregation of the GSPO paper."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_losses import batch

from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import c_of_eps

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [(3e-4, 4e-4), (1e-3, 5e-4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_seq_gspo_equals_verl_gspo(seed: int, dtype: torch.dtype, clip: tuple[float, float], weighted: bool) -> None:
    from verl.workers.config import ActorConfig

    log_prob, old, advantages, mask = batch(seed, sequences=32, width=200, scale=0.005, dtype=dtype)
    weights = torch.linspace(0.5, 1.5, 32, dtype=dtype)[:, None].expand_as(old) if weighted else None
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=clip[0], clip_ratio_high=clip[1]
    )
    config.global_batch_info.update(dp_size=2, batch_num_tokens=int(mask.sum()), global_batch_size=48)
    theirs, metrics = core_algos.compute_policy_loss_gspo(
        old_log_prob=old,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode="seq-mean-token-mean",
        config=config,
        rollout_is_weights=weights,
    )
    (their_gradient,) = torch.autograd.grad(theirs, log_prob)

    c_low, c_high = c_of_eps(*clip)
    settings = dataclasses.replace(ALGORITHMS["seq_gspo"], c_low=c_low, c_high=c_high)
    output = sequence_policy_loss(log_prob, old, advantages, mask, settings, rollout_is_weights_BT=weights)
    ours = output.loss_B.sum() / 48 * 2
    (our_gradient,) = torch.autograd.grad(ours, log_prob)

    clipped_tokens = ((output.clipped_high_B | output.clipped_low_B) * output.length_B).sum() / mask.sum()
    assert 0 < float(clipped_tokens) < 1
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float(clipped_tokens), abs=1e-6)
    assert float((our_gradient - their_gradient).norm()) <= 1e-6 * float(their_gradient.norm())
    mean_term = float(output.loss_B.detach().abs().sum()) / 48 * 2
    assert abs(float(ours.detach()) - float(theirs.detach())) <= 1e-6 * mean_term
