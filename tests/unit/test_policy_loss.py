"""The losses as verl calls them, from its registry."""

from __future__ import annotations

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from fspo.losses import ALGORITHMS, sequence_policy_loss
from recipe.fspo.config import SequencePolicyLossConfig
from recipe.fspo.policy_loss import register_losses


def test_a_taken_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every name is taken by our own registration, so a second, uncached one must refuse.
    with pytest.raises(RuntimeError, match="already holds fspo"):
        register_losses.__wrapped__()


def test_verl_keeps_its_own_gspo() -> None:
    assert core_algos.POLICY_LOSS_REGISTRY["gspo"] is core_algos.compute_policy_loss_gspo


def actor_config(policy_loss: PolicyLossConfig, **info: object) -> FSDPActorConfig:
    config = FSDPActorConfig(
        strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss, rollout_n=2, use_dynamic_bsz=True
    )
    config.global_batch_info.update(info)
    return config


def random_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, width = 6, 12
    old = -torch.rand(rows, width, generator=generator)
    new = old + 0.02 * torch.randn(rows, width, generator=generator)
    length = torch.tensor([12, 7, 3, 1, 9, 0])
    mask = (torch.arange(width) < length[:, None]).long()
    advantage = torch.randn(rows, 1, generator=generator).expand(rows, width) * mask
    return {"old_log_prob": old, "log_prob": new, "advantages": advantage, "response_mask": mask}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("typed", [True, False])
def test_registered_loss_is_the_mean_of_the_library_loss(name: str, typed: bool) -> None:
    batch = random_batch()
    policy_loss = SequencePolicyLossConfig(loss_mode=name) if typed else PolicyLossConfig(loss_mode=name)
    config = actor_config(policy_loss, global_batch_size=20, dp_size=2, batch_num_tokens=99)
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        **batch, loss_agg_mode="token-mean", config=config, a_future_keyword=None
    )
    expected = sequence_policy_loss(
        batch["log_prob"], batch["old_log_prob"], batch["advantages"], batch["response_mask"], ALGORITHMS[name]
    )
    assert torch.allclose(loss, expected.loss_B.sum() / 20 * 2)
    assert set(metrics) == {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/seq_outside_band"}
    clipped = (expected.clipped_high_B | expected.clipped_low_B).sum()
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float(clipped) / 5)  # 5 of 6 rows have tokens


def test_a_rank_without_the_global_batch_size_is_refused() -> None:
    config = actor_config(SequencePolicyLossConfig(), dp_size=2)
    with pytest.raises(ValueError, match="global_batch_size"):
        core_algos.get_policy_loss_fn("fspo")(**random_batch(), config=config)


def test_typed_settings_override_the_defaults() -> None:
    settings = SequencePolicyLossConfig(loss_mode="fspo", clip_low=0.05, dual_clip=3.0).settings()
    assert (settings.clip_low, settings.clip_high, settings.dual_clip) == (0.05, 0.03, 3.0)
    with pytest.raises(ValueError, match=r"policy_loss\.clip_high=-1"):
        SequencePolicyLossConfig(loss_mode="fspo", clip_high=-1)
    with pytest.raises(ValueError, match="not a sequence-level loss"):
        SequencePolicyLossConfig(loss_mode="vanilla")
