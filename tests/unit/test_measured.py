"""What a run measures and then holds fixed: which responses count, in which step, and what ranks and resumes change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from composing import completed, composed
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import FSDPActorConfig

import fspo.verl
from recipe.fspo.config import complete
from recipe.fspo.measured_values import LossScale
from recipe.fspo.recorder import Recorder

LOSS = "actor_rollout_ref.actor.policy_loss"
LENGTH = torch.tensor([10, 30, 80])


@pytest.mark.parametrize(
    ("overrides", "factor"),
    [
        (("fspo.match_scale=native",), 1.0),
        (("algo=rloo",), 1 / 40),
        (("algo=luspo",), 1 / 40),
        (("algo=gspo",), 1.0),  # has 1/L in itself
        (("algo=grpo",), 1.0),  # a mean over tokens
        (("algo=fspo", f"{LOSS}.grad_scale='1/L'"), 1.0),
    ],
)
def test_only_losses_that_sum_over_tokens_are_divided(overrides: tuple[str, ...], factor: float) -> None:
    scale = LossScale(completed(*overrides))
    scale.measure(LENGTH)
    assert scale.factor == pytest.approx(factor)


GIVEN = f"{LOSS}.grad_multiplier=0.025"


def plain(*overrides: str) -> DictConfig:
    """The configuration that verl's own command hands to the trainer ``trainer.v1.trainer_mode=fspo``."""
    config = composed(*overrides)
    loss = config.actor_rollout_ref.actor.policy_loss
    with open_dict(config):
        config.actor_rollout_ref.actor.policy_loss = {key: loss[key] for key in loss if loss[key] is not None}
        config.pop("fspo")
        config.trainer.use_v1 = True
    complete(config)
    return config


def gradient_norm(config: DictConfig, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of the registered loss, with the factor that the trainer of this configuration sends to its workers."""
    scale = LossScale(config)
    scale.measure(LENGTH)
    recorder = Recorder()
    monkeypatch.setattr(fspo.verl, "recorder", recorder)
    recorder.begin_update(None, step=1, loss_scale=scale.factor)
    loss = instantiate(config.actor_rollout_ref.actor.policy_loss, _convert_="partial")
    actor = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=loss)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=3, loss_scale_factor=None)
    mask = torch.arange(80) < LENGTH[:, None]
    new = torch.zeros(3, 80, dtype=torch.float64, requires_grad=True)
    tensors = {"old_log_prob": torch.zeros_like(new), "log_prob": new, "advantages": torch.ones_like(new)}
    value, _ = POLICY_LOSS_REGISTRY[loss.loss_mode](**tensors, response_mask=mask, config=actor)
    return float(torch.autograd.grad(value, new)[0].norm())


@pytest.mark.parametrize("command", [completed, plain])
def test_a_given_factor_on_the_gradient_is_the_only_one(
    command: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With old log-probabilities that are the policy's, each token's gradient is the factor over the sequences."""
    whole = np.sqrt(10 + 30 + 80) / 3
    assert gradient_norm(command(), monkeypatch) == pytest.approx(whole / 40)
    assert "grad_multiplier" not in capsys.readouterr().out
    given = command(GIVEN)
    assert gradient_norm(given, monkeypatch) == pytest.approx(whole * 0.025)
    assert given.fspo.match_scale == "native"
    assert gradient_norm(command(f"{LOSS}.grad_multiplier=1.0"), monkeypatch) == pytest.approx(whole), "1 counts, too"
    resumed = LossScale(given)
    resumed.load_state_dict({"length": 40.0})
    assert resumed.factor == 1


@pytest.mark.parametrize(
    ("overrides", "clip_values"),
    [
        *((f"algo={algo}", "measured") for algo in ("fspo", "fspo_v1", "gspo", "rloo", "luspo")),
        *((f"algo={algo}", "published") for algo in ("unclipped", "gspo_verl", "grpo")),
        ("fspo.clip_values=published", "published"),
        (f"{LOSS}.c_low=0.05", "published"),
        ("evaluate=true", "published"),
    ],
)
def test_run_json_says_where_a_run_s_clip_values_come_from(overrides: str, clip_values: str) -> None:
    """With a note only of a loss that would have measured them."""
    config = composed(overrides)
    notes = [note for note in complete(config) if note.startswith("clip values")]
    assert config.fspo.clip_values == clip_values
    line = {f"{LOSS}.c_low=0.05": "c_low=0.05", "evaluate=true": "evaluate=true", "algo=unclipped": "c_low"}.get(
        overrides
    )
    assert len(notes) == bool(line) and all(str(line) in note for note in notes)
