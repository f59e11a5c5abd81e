"""The losses as verl calls them, from its registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import holds
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

import fspo.verl
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import BandState
from fspo.verl import SequencePolicyLossConfig
from recipe.fspo.recorder import Recorder


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


#: The losses whose band is measured during training.
NEED_STATE = [name for name, settings in ALGORITHMS.items() if settings.needs_state]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """As it is in plain verl: no trainer sends a state."""
    recorder = Recorder()
    monkeypatch.setattr(fspo.verl, "recorder", recorder)
    return recorder


@pytest.mark.parametrize(
    ("name", "cls"),
    [(name, cls) for name in ALGORITHMS for cls in (PolicyLossConfig, SequencePolicyLossConfig)],
)
def test_registered_loss_is_the_mean_of_the_library_loss(
    name: str, cls: type[PolicyLossConfig], recorder: Recorder
) -> None:
    recorder.begin_update(BandState() if name in NEED_STATE else None, step=1)
    batch = random_batch()
    config = actor_config(cls(loss_mode=name), global_batch_size=20, dp_size=2, batch_num_tokens=99)
    value, metrics = core_algos.get_policy_loss_fn(name)(
        **batch, loss_agg_mode="token-mean", config=config, a_future_keyword=None
    )
    settings = ALGORITHMS[name]
    names = ("log_prob", "old_log_prob", "advantages", "response_mask")
    state = [BandState()] if name in NEED_STATE else []
    expected = sequence_policy_loss(*(batch[name] for name in names), settings, *state)
    assert torch.equal(value, expected.loss_B.sum() / 20 * 2)
    lost = float(expected.clipped_high_B.sum() + expected.clipped_low_B.sum())
    assert metrics == {  # 5 of 6 rows have tokens
        "actor/pg_clipfrac": pytest.approx(lost / 5),
        "actor/ppo_kl": pytest.approx(float(-expected.log_ratio_B.sum() / expected.length_B.sum())),
        "actor/seq_outside_band": pytest.approx(1 - float(expected.accepted_B.sum()) / 5),
    }


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    ("loss_mode", "fields", "key"),
    [
        *((name, {}, f"loss_mode={name}") for name in NEED_STATE),
        ("luspo", {"drift": "kl"}, "drift=kl"),
    ],
)
def test_a_band_that_nobody_measures_does_not_become_another_one(
    loss_mode: str, fields: dict[str, Any], key: str, typed: bool, recorder: Recorder
) -> None:
    """In a worker whose trainer sends no state; with the state before any data the loss trains."""
    cls = SequencePolicyLossConfig if typed or fields else PolicyLossConfig
    config = actor_config(cls(loss_mode=loss_mode, **fields), global_batch_size=6, dp_size=1)
    loss = core_algos.get_policy_loss_fn(loss_mode)
    with pytest.raises(ValueError, match=holds(f"policy_loss.{key} ", "trainer_mode=fspo")):
        loss(**random_batch(), config=config)
    recorder.begin_update(BandState(), step=1)
    assert loss(**random_batch(), config=config)[0].isfinite()


def test_typed_settings_override_the_defaults() -> None:
    settings = SequencePolicyLossConfig(loss_mode="fspo", c_low=0.05, s_max=3.0).settings()
    assert (settings.c_low, settings.c_high, settings.s_max) == (0.05, 0.03, 3.0)
    with pytest.raises(ValueError, match=r"policy_loss\.c_high=-1"):
        SequencePolicyLossConfig(loss_mode="fspo", c_high=-1)
    with pytest.raises(ValueError, match="loss_mode='vanilla'"):
        SequencePolicyLossConfig(loss_mode="vanilla")


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {*NEED_STATE}))
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "rule", ["seq_sum_k1", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"]
)
def test_verls_rollout_correction_weighs_and_removes_whole_responses(name: str, weighted: bool, rule: str) -> None:
    batch = random_batch()
    gap_B1 = torch.tensor([[0.9], [0.01], [-0.02], [0.05], [-0.03], [0.0]])  # of one response only is it large
    data = DataProto.from_dict(
        {
            "old_log_probs": batch["old_log_prob"],
            "rollout_log_probs": batch["old_log_prob"] - gap_B1,
            "response_mask": batch["response_mask"],
        }
    )
    correction = RolloutCorrectionConfig(
        rollout_is="sequence" if weighted else None, rollout_rs=rule, rollout_rs_threshold=1.5 if "k1" in rule else 0.3
    )
    data, _ = compute_rollout_correction_and_add_to_batch(data, correction)
    kept_B = data.batch["response_mask"].any(1)
    assert kept_B.tolist() == [False, True, True, True, True, False]
    weight_BT = data.batch["rollout_is_weights"] if weighted else None

    def gradient_BT(response_mask: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        log_prob = batch["log_prob"].clone().requires_grad_()
        config = actor_config(SequencePolicyLossConfig(loss_mode=name), global_batch_size=6, dp_size=1)
        arguments = batch | {"log_prob": log_prob, "response_mask": response_mask}
        loss, _ = core_algos.get_policy_loss_fn(name)(**arguments, config=config, rollout_is_weights=weights)
        return torch.autograd.grad(loss, log_prob)[0]

    plain_BT = gradient_BT(batch["response_mask"], None) * kept_B[:, None]
    factor_B1 = (gap_B1 * batch["response_mask"].sum(1, keepdim=True)).exp().clamp(max=2) if weighted else 1
    assert plain_BT.any()
    assert torch.allclose(gradient_BT(data.batch["response_mask"], weight_BT), plain_BT * factor_B1, rtol=1e-5)
