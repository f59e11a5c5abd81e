"""verl's own losses: observed without being changed, and each against a plain formula."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.utils.import_utils import import_external_libs
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

import fspo.verl
from fspo.types import BandState
from recipe.fspo import policy_loss
from recipe.fspo.recorder import MiniBatch, Recorder

#: Clips that act on the batch below: bounds on ratios, for geo_mean on their logarithm, for dppo on divergences.
CLIPS: dict[str, dict[str, Any]] = {
    "vanilla": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.25},
    "gspo": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.02},
    "sapo": {"tau_pos": 5.0, "tau_neg": 8.0},
    "cispo": {"clip_ratio_low": 0.3, "clip_ratio_high": 0.1},
    "geo_mean": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
    "dppo_tv": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.02, "clip_ratio_c": 1.3},
    "dppo_kl": {"clip_ratio_low": 0.01, "clip_ratio_high": 0.005, "clip_ratio_c": 1.3},
}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    registry = dict(core_algos.POLICY_LOSS_REGISTRY)
    monkeypatch.setattr(policy_loss, "POLICY_LOSS_REGISTRY", registry)
    recorder = Recorder()
    monkeypatch.setattr(policy_loss, "RECORDER", recorder)
    monkeypatch.setattr(fspo.verl, "recorder", recorder)
    policy_loss.observe_losses()
    recorder.enable(40)
    recorder.begin_update(None, step=1)
    return recorder


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(64, 40, generator=generator, dtype=torch.float64)
    length = torch.randint(1, 41, (64, 1), generator=generator)
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.3 * torch.randn(64, 40, generator=generator, dtype=torch.float64)).clamp(max=0),
        "advantages": torch.randn(64, 1, generator=generator, dtype=torch.float64).expand(64, 40).contiguous(),
        "response_mask": torch.arange(40) < length,
    }


def run(name: str, registry: dict[str, Callable[..., Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **CLIPS[name])
    config.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=64, loss_scale_factor=None)
    inputs = batch()
    inputs["log_prob"].requires_grad_()
    loss, _ = registry[name](**inputs, loss_agg_mode="seq-mean-token-mean", config=config, rollout_is_weights=None)
    return loss.detach(), torch.autograd.grad(loss, inputs["log_prob"])[0]


def weights(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """w_t without a clip and what the loss weighs by, for A > 0 and A < 0 as the rows have it, [B, T] each."""
    inputs, clips = batch(), CLIPS[name]
    old, new, mask = inputs["old_log_prob"], inputs["log_prob"], inputs["response_mask"]
    plus, d = inputs["advantages"] > 0, new - old
    r, p, q = d.exp(), new.exp(), old.exp()
    low, high, cap = (clips.get(f"clip_ratio_{end}", 0.0) for end in ("low", "high", "c"))
    if name == "vanilla":
        return r, r * torch.where(plus, r <= 1 + high, (r >= 1 - low) & (r <= 3))
    if name == "sapo":
        tau = torch.where(plus, clips["tau_pos"], clips["tau_neg"])
        gate = torch.sigmoid(tau * (r - 1))
        return r, r * 4 * gate * (1 - gate)
    if name == "cispo":
        return r, r.clamp(1 - low, 1 + high)
    if name == "dppo_tv":
        return r, r.clamp(max=cap) * torch.where(plus, p - q <= high, p - q >= -low)
    if name == "dppo_kl":
        divergence = q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        return r, r.clamp(max=cap) * torch.where(plus, (divergence <= high) | (p <= q), (divergence <= low) | (p >= q))
    assert name == "geo_mean"
    clipped = torch.where(plus, d.clamp(max=high), d.clamp(min=-low))
    mean = (clipped * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    whole = ((d * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp().expand_as(d)
    return whole, mean.exp() * (clipped == d)


@pytest.mark.parametrize("name", [name for name in CLIPS if name != "gspo"])
def test_gradient_and_record_against_a_plain_formula(name: str, recorder: Recorder) -> None:
    inputs = batch()
    mask, advantages = inputs["response_mask"], inputs["advantages"]
    recorder.begin_mini_batch()
    _, gradient = run(name, policy_loss.POLICY_LOSS_REGISTRY)
    free, weight = weights(name)
    expected = -advantages * weight * mask / mask.sum(1, keepdim=True) / 64
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)

    recorded = only(recorder)
    kept = (torch.minimum(free, weight) * mask).sum(1) / (free * mask).sum(1)
    assert 0.3 < float(kept.mean()) < 0.99
    np.testing.assert_allclose(recorded.rows["kept"], kept, rtol=1e-6)
    assert (recorded.rows["inside"] <= recorded.rows["kept"] + 1e-6).all()
    assert recorded.rows["L"].tolist() == mask.sum(1).tolist()


def only(recorder: Recorder) -> MiniBatch:
    recorder.end_mini_batch(grad_norm=None)
    (mini_batch,) = recorder.pop()
    return mini_batch


def assert_same(first: MiniBatch, second: MiniBatch) -> None:
    assert set(first.rows) == set(second.rows) and len(first.rows["S"]) == 64
    for name in first.rows.keys() - {"update", "minibatch"}:
        np.testing.assert_array_equal(first.rows[name], second.rows[name])


def test_every_loss_of_verls_trains_as_before(recorder: Recorder) -> None:
    for name in CLIPS:
        recorder.begin_mini_batch()
        torch.manual_seed(5)
        observed = run(name, policy_loss.POLICY_LOSS_REGISTRY)
        drawn = torch.rand(1)
        torch.manual_seed(5)
        plain = run(name, {**core_algos.POLICY_LOSS_REGISTRY})
        assert torch.equal(observed[0], plain[0]) and torch.equal(observed[1], plain[1]), name
        assert torch.equal(drawn, torch.rand(1)), name


def test_verls_gspo_is_recorded_by_its_band(recorder: Recorder) -> None:
    recorder.begin_mini_batch()
    run("gspo", policy_loss.POLICY_LOSS_REGISTRY)
    inputs = batch()
    mask = inputs["response_mask"]
    mean = ((inputs["log_prob"] - inputs["old_log_prob"]) * mask).sum(1) / mask.sum(1)
    assert only(recorder).rows["inside"].sum() == int(((mean.exp() - 1).abs() <= 0.02).sum())


def test_a_matched_gradient_scale_multiplies_the_loss_and_nothing_that_is_recorded(recorder: Recorder) -> None:
    records = []
    for scale in (1.0, 0.02):
        recorder.begin_update(None, step=1, loss_scale=scale)
        recorder.begin_mini_batch()
        records.append(run("vanilla", policy_loss.POLICY_LOSS_REGISTRY))
        recorder.end_mini_batch(None)
    (loss, gradient), (smaller_loss, smaller_gradient) = records
    torch.testing.assert_close(smaller_loss, 0.02 * loss)
    torch.testing.assert_close(smaller_gradient, 0.02 * gradient)
    first, second = recorder.pop()
    assert_same(first, second)


def ours(registry: dict[str, Callable[..., Any]], name: str = "fspo") -> Any:
    settings = PolicyLossConfig(loss_mode="fspo")
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=settings)
    config.global_batch_info.update(dp_size=1, global_batch_size=64)
    return registry[name](**batch(), config=config)


def test_a_loss_of_ours_records_nothing_by_itself_and_once_in_the_wrapper(recorder: Recorder) -> None:
    value, _ = ours({**core_algos.POLICY_LOSS_REGISTRY})
    output = recorder.pop_output()
    assert recorder.audit is not None and recorder.audit.micro_batches == 0 and output is not None
    recorder.begin_mini_batch()
    again, _ = ours(policy_loss.POLICY_LOSS_REGISTRY)
    assert torch.equal(again, value)
    recorded = only(recorder)
    assert recorded.rows["inside"].tolist() == output.accepted_B.tolist()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_loss_that_calls_another_one_is_recorded_and_scaled_once(keeps: bool, recorder: Recorder) -> None:
    registry = policy_loss.POLICY_LOSS_REGISTRY

    def calling(*tensors: torch.Tensor, **more: Any) -> tuple[torch.Tensor, dict[str, float]]:
        value, metrics = registry["fspo"](*tensors, **more)
        return value, metrics if keeps else {}

    registry["calling"] = calling
    policy_loss.observe_losses()
    plain, _ = ours({**core_algos.POLICY_LOSS_REGISTRY})
    recorder.begin_update(None, step=1, loss_scale=0.5)
    recorder.begin_mini_batch()
    value, _ = ours(registry, "calling")
    torch.testing.assert_close(value, 0.5 * plain)
    assert len(only(recorder).rows["S"]) == 64


def test_the_factor_on_the_gradient_acts_once_on_a_loss_of_ours_and_whoever_imports_it_again_changes_nothing(
    recorder: Recorder,
) -> None:
    """``external_lib=fspo.verl`` beside a trainer of this recipe."""
    plain, _ = ours(policy_loss.POLICY_LOSS_REGISTRY)
    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    import_external_libs("fspo.verl")
    assert before == core_algos.POLICY_LOSS_REGISTRY
    recorder.begin_update(BandState(clip_scale=1e-3), step=1, loss_scale=0.5)
    recorder.begin_mini_batch()
    ours(policy_loss.POLICY_LOSS_REGISTRY)
    assert only(recorder).rows["inside"].sum() < 8, "the measured band acts"
    recorder.begin_update(BandState(), step=1, loss_scale=0.5)
    torch.testing.assert_close(ours(policy_loss.POLICY_LOSS_REGISTRY)[0], 0.5 * plain)


@pytest.mark.parametrize("name", [*CLIPS, "fspo"])
@pytest.mark.parametrize("by_position", range(8))
def test_any_arguments_may_be_given_by_position(name: str, by_position: int, recorder: Recorder) -> None:
    """A loss is handed what it was called with, and recorded as if all of it had been given by name."""
    clips = CLIPS.get(name, {"policy_loss": PolicyLossConfig(loss_mode=name)})
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **clips)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=64, loss_scale_factor=None)
    arguments = batch() | {"loss_agg_mode": "seq-mean-token-mean", "config": config, "rollout_is_weights": None}
    own = inspect.signature(core_algos.POLICY_LOSS_REGISTRY[name]).parameters
    inputs = {key: arguments[key] for key in own if key in arguments}
    values, columns = list(inputs.values())[:by_position], dict(list(inputs.items())[by_position:])
    results = []
    for call in (lambda loss: loss(**inputs), lambda loss: loss(*values, **columns)):
        recorder.begin_mini_batch()
        results.append((call(policy_loss.POLICY_LOSS_REGISTRY[name]), only(recorder)))
    ((value, _), first), ((same, _), second) = results
    assert torch.equal(value, same)
    assert_same(first, second)
    assert torch.equal(value, core_algos.POLICY_LOSS_REGISTRY[name](*values, **columns)[0])


def odd_names(old: Any, new: Any, adv: Any, mask: Any, mode: str, cfg: Any, weights: Any = None) -> Any:
    return core_algos.POLICY_LOSS_REGISTRY["fspo"](old, new, adv, mask, config=cfg)


def any_names(*values: Any, **more: Any) -> Any:
    return odd_names(*values, *more.values())


@pytest.mark.parametrize(("loss", "by_position"), [(odd_names, 6), (odd_names, 4), (any_names, 6), (any_names, 5)])
def test_a_loss_that_is_registered_later_may_have_names_of_its_own(
    loss: Callable[..., Any], by_position: int, recorder: Recorder
) -> None:
    policy_loss.POLICY_LOSS_REGISTRY["later"] = loss
    policy_loss.observe_losses()
    names = ("old", "new", "adv", "mask", "mode", "cfg")
    recorder.begin_mini_batch()
    settings = PolicyLossConfig(loss_mode="fspo")
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=settings)
    config.global_batch_info.update(dp_size=1, global_batch_size=64)
    values = [*(batch()[key] for key in ("old_log_prob", "log_prob", "advantages", "response_mask")), "mode", config]
    by_name = dict(zip(names[by_position:], values[by_position:], strict=True))
    value, _ = policy_loss.POLICY_LOSS_REGISTRY["later"](*values[:by_position], **by_name)
    assert torch.equal(value, ours({**core_algos.POLICY_LOSS_REGISTRY})[0])
    recorded = only(recorder)
    assert len(recorded.rows["S"]) == 64 and 0 < recorded.rows["inside"].sum() < 64
