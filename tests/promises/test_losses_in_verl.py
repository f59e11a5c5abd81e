"""Promises 3, 5 and 14: the losses in verl's registry, and verl's own beside them."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import pytest
import torch
from formulas import batch
from library import ALGORITHMS, NAMES, SequenceLossSettings, c_of_eps, sequence_policy_loss
from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from fspo.verl import SequencePolicyLossConfig

pytestmark = pytest.mark.promise(1, 3, 5, 14)
FIXED = tuple(name for name in NAMES if name != "fspo_v1")


def actor(loss_mode: str, rows: int = 20, ranks: int = 2, tokens: int = 99, **clips: Any) -> FSDPActorConfig:
    """verl's settings of an actor, as a script has them that chooses nothing but the loss."""
    loss = PolicyLossConfig(loss_mode=loss_mode)
    config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=2, policy_loss=loss, **clips)
    config.global_batch_info.update(global_batch_size=rows, dp_size=ranks, batch_num_tokens=tokens)
    return config


def call(name: str, inputs: Any, config: Any, weights: Any = None, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient, by the function that verl's workers look up."""
    log_prob, old, advantages, mask = inputs
    log_prob = log_prob.detach().requires_grad_()
    batch = {"old_log_prob": old, "log_prob": log_prob, "advantages": advantages, "response_mask": mask}
    more |= {"loss_agg_mode": "seq-mean-token-mean", "config": config, "rollout_is_weights": weights}
    loss, _ = core_algos.get_policy_loss_fn(name)(**batch, **more)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [(3e-4, 4e-4), (1e-3, 5e-4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_seq_gspo_is_the_gspo_of_verl(seed: int, dtype: torch.dtype, clip: tuple[float, float], weighted: bool) -> None:
    inputs = batch(seed, rows=32, width=200, scale=0.005, dtype=dtype)
    weights = torch.linspace(0.5, 1.5, 32, dtype=dtype)[:, None].expand(32, 200) if weighted else None
    config = actor("gspo", 48, 2, int(inputs[3].sum()), clip_ratio_low=clip[0], clip_ratio_high=clip[1])
    theirs, their_gradient = call("gspo", inputs, config, weights)
    c_low, c_high = c_of_eps(*clip)
    loss = dataclasses.replace(ALGORITHMS["seq_gspo"], c_low=c_low, c_high=c_high)
    log_prob = inputs[0].detach().requires_grad_()
    output = sequence_policy_loss(log_prob, *inputs[1:], loss, rollout_is_weights_BT=weights)
    ours = output.loss_B.sum() / 48 * 2
    (our_gradient,) = torch.autograd.grad(ours, log_prob)
    assert output.clipped_high_B.any() and output.clipped_low_B.any()
    assert float((our_gradient - their_gradient).norm()) <= 1e-6 * float(their_gradient.norm())
    assert abs(float(ours.detach() - theirs)) <= 1e-6 * float(output.loss_B.detach().abs().sum()) / 24


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_registered_loss_is_the_library_s_bit_for_bit(name: str, weighted: bool, dtype: torch.dtype) -> None:
    """With verl's own class of settings, and with an argument that a later verl may add."""
    inputs = batch(1, rows=8, width=40, scale=0.02, dtype=dtype)
    weights = torch.linspace(0.5, 1.5, 8)[:, None].expand(8, 40) if weighted else None
    value, gradient = call(name, inputs, actor(name), weights, of_a_later_verl=None)
    log_prob = inputs[0].detach().requires_grad_()
    output = sequence_policy_loss(log_prob, *inputs[1:], ALGORITHMS[name], rollout_is_weights_BT=weights)
    expected = output.loss_B.sum() / 20 * 2
    assert torch.equal(value, expected.detach())
    assert torch.equal(gradient, torch.autograd.grad(expected, log_prob)[0])


@pytest.mark.parametrize("name", FIXED)
def test_verl_s_bounds_on_token_ratios_change_none_of_ours(name: str) -> None:
    inputs = batch(1, rows=8, width=40, scale=0.02)
    plain, other = actor(name), actor(name, clip_ratio=0.01, clip_ratio_low=0.01, clip_ratio_high=0.01)
    assert torch.equal(call(name, inputs, plain)[1], call(name, inputs, other)[1])


def test_a_drift_that_no_trainer_measures_is_refused() -> None:
    with pytest.raises(ValueError, match="fspo_v1"):
        call("fspo_v1", batch(1), actor("fspo_v1"))
    object.__setattr__(config := actor("fspo"), "policy_loss", SequencePolicyLossConfig(drift="kl"))
    with pytest.raises(ValueError, match=r"policy_loss\.drift=kl "):
        call("fspo", batch(1), config)


@pytest.mark.parametrize("name", FIXED)
def test_external_lib_gives_any_verl_the_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a release to which this repository has no plugin: ``model.external_lib=fspo.verl`` alone registers."""
    registry = {key: loss for key, loss in core_algos.POLICY_LOSS_REGISTRY.items() if key not in NAMES}
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", registry)
    spec = importlib.util.find_spec("fspo.verl")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # a copy: the module that others use stays
    inputs = batch(1, rows=8, width=40, scale=0.02, dtype=torch.float32)
    output = sequence_policy_loss(*inputs, ALGORITHMS[name])
    assert torch.equal(call(name, inputs, actor(name))[0], output.loss_B.sum() / 20 * 2)


#: verl's own losses, by the function that defines each, with clips that act on the batch below.
OF_VERL = {
    "vanilla": ("compute_policy_loss_vanilla", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}),
    "gspo": ("compute_policy_loss_gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "geo_mean": ("compute_policy_loss_geo_mean", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}),
    "gpg": ("compute_policy_loss_gpg", {}),
    "clip_cov": ("compute_policy_loss_clip_cov", {}),
}


@pytest.mark.parametrize("name", OF_VERL)
def test_a_loss_of_verl_is_the_one_that_verl_defines(name: str) -> None:
    """Value, gradient and the random numbers that are left, where this repository is installed."""
    function, clips = OF_VERL[name]
    inputs, config = batch(2, rows=16, width=30, scale=0.03), actor(name, **clips)
    torch.manual_seed(0)
    value, gradient = call(name, inputs, config)
    after = torch.rand(1)
    torch.manual_seed(0)
    log_prob = inputs[0].detach().requires_grad_()
    theirs, _ = getattr(core_algos, function)(
        inputs[1], log_prob, *inputs[2:], loss_agg_mode="seq-mean-token-mean", config=config
    )
    assert torch.equal(value, theirs.detach())
    assert torch.equal(gradient, torch.autograd.grad(theirs, log_prob)[0]) and torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("name", [*FIXED, "gspo", "vanilla"])
def test_a_response_without_advantage_has_no_gradient(name: str) -> None:
    """So that it may be left out: the others have the gradient that they had beside it, bit for bit."""
    log_prob, old, advantages, mask = batch(3, rows=12, width=30, scale=0.02)
    zero = torch.arange(12) % 3 == 0
    advantages = advantages.masked_fill(zero[:, None], 0.0)
    inputs = (log_prob, old, advantages, mask)
    clips = OF_VERL.get(name, ("", {}))[1]
    whole = call(name, inputs, actor(name, **clips))[1]
    some = call(name, tuple(tensor[~zero] for tensor in inputs), actor(name, **clips))[1]
    assert not whole[zero].any() and torch.equal(whole[~zero], some) and some.any()


def test_any_settings_of_the_family_reach_the_registered_loss() -> None:
    """Written as overrides of a configuration, through the class that conf/ names."""
    from hydra.utils import instantiate

    given = {"exponent": 0.43, "c_low": 0.02, "c_high": 0.05, "grad_multiplier": 0.5}
    loss, config = SequenceLossSettings(**given), actor("fspo")
    settings = {"_target_": "fspo.verl.SequencePolicyLossConfig", "loss_mode": "fspo", **given}
    object.__setattr__(config, "policy_loss", instantiate(settings))
    inputs = batch(4)
    expected = float(sequence_policy_loss(*inputs, loss).loss_B.sum()) / 20 * 2
    assert float(call("fspo", inputs, config)[0]) == pytest.approx(expected, rel=1e-12)
    assert not math.isclose(expected, float(call("fspo", inputs, actor("fspo"))[0]), rel_tol=1e-3)
