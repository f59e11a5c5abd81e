"""The losses as verl calls them, from its registry; tests/promises/test_losses_in_verl.py holds that they are ours."""

from __future__ import annotations

from typing import Any

import batches
import pytest
import torch
from messages import holds
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import FSDPActorConfig

import fspo.verl
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import BandState
from fspo.verl import SequencePolicyLossConfig
from recipe.fspo.recorder import Recorder

NAMES = ("log_prob", "old_log_prob", "advantages", "response_mask")


def random_batch() -> dict[str, torch.Tensor]:
    """Six responses, of which the last has no token."""
    batch = dict(zip(NAMES, batches.random_batch(6, 12, scale=0.02, shortest=1), strict=True))
    batch["response_mask"][5] = False
    return batch


def call(batch: dict[str, torch.Tensor], weights: torch.Tensor | None = None, **settings: Any) -> Any:
    loss = SequencePolicyLossConfig(**settings)
    config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, policy_loss=loss, rollout_n=2)
    config.global_batch_info.update(global_batch_size=20, dp_size=2)
    return core_algos.get_policy_loss_fn(loss.loss_mode)(**batch, config=config, rollout_is_weights=weights)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """As it is in plain verl: no trainer sends a state."""
    recorder = Recorder()
    monkeypatch.setattr(fspo.verl, "recorder", recorder)
    return recorder


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_loss_has_verls_metrics_and_the_recorders_state_and_scale(name: str, recorder: Recorder) -> None:
    state, batch = BandState(drift_per_token=1e-3, clip_scale=2.0), random_batch()
    recorder.begin_update(state, step=1, loss_scale=0.25)
    value, metrics = call(batch, loss_mode=name)
    output = sequence_policy_loss(*batch.values(), ALGORITHMS[name], state)
    assert torch.equal(value, output.loss_B.sum() / 20 * 2 * 0.25)
    lost = float(output.clipped_high_B.sum() + output.clipped_low_B.sum())
    assert metrics == {  # 5 of 6 rows have tokens
        "actor/pg_clipfrac": pytest.approx(lost / 5),
        "actor/ppo_kl": pytest.approx(float(-output.log_ratio_B.sum() / output.length_B.sum())),
        "actor/seq_outside_band": pytest.approx(1 - float(output.accepted_B.sum()) / 5),
    }


@pytest.mark.parametrize(("key", "value"), [("loss_mode", "fspo_v1"), ("drift", "kl")])
def test_a_band_that_nobody_measures_becomes_no_other(key: str, value: str, recorder: Recorder) -> None:
    """With the state before any data it trains."""
    with pytest.raises(ValueError, match=holds(f"policy_loss.{key}={value} ", "trainer_mode=fspo")):
        call(random_batch(), **{key: value})
    recorder.begin_update(BandState(), step=1)
    assert call(random_batch(), **{key: value})[0].isfinite()


def test_settings_of_another_loss_are_refused_by_their_key() -> None:
    with pytest.raises(ValueError, match=r"policy_loss\.loss_mode='vanilla'"):
        SequencePolicyLossConfig(loss_mode="vanilla")


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("rule", ["seq_sum_k1", "seq_mean_k1", "seq_max_k3"])
def test_verls_rollout_correction_weighs_and_removes_whole_responses(rule: str) -> None:
    batch, mask = random_batch(), random_batch()["response_mask"]
    gap_B1 = torch.tensor([[0.9], [0.01], [-0.02], [0.03], [-0.03], [0.0]])  # of one response only is it large
    columns = {"old_log_probs": batch["old_log_prob"], "rollout_log_probs": batch["old_log_prob"] - gap_B1}
    correction = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs=rule, rollout_rs_threshold=1.5 if "k1" in rule else 0.3
    )
    data, _ = compute_rollout_correction_and_add_to_batch(
        DataProto.from_dict(columns | {"response_mask": mask}), correction
    )
    kept_B = data.batch["response_mask"].any(1)
    assert kept_B.tolist() == [False, True, True, True, True, False]

    def gradient_BT(response_mask: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        log_prob = batch["log_prob"].clone().requires_grad_()
        loss, _ = call(batch | {"log_prob": log_prob, "response_mask": response_mask}, weights, loss_mode="fspo")
        return torch.autograd.grad(loss, log_prob)[0]

    weight_B1 = (gap_B1 * mask.sum(1, keepdim=True)).exp().clamp(max=2) * kept_B[:, None]
    plain_BT = gradient_BT(mask, None)
    assert plain_BT.any()
    corrected_BT = gradient_BT(data.batch["response_mask"], data.batch["rollout_is_weights"])
    assert torch.allclose(corrected_BT, plain_BT * weight_B1, rtol=1e-5)
