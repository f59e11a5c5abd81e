"""What a run measures and then holds fixed: which responses count, in which step, and what ranks and resumes change."""

from __future__ import annotations

import pytest
import torch
from composing import completed

from recipe.fspo.config import policy_loss_settings
from recipe.fspo.measured_values import LossScale

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


def test_a_given_factor_on_the_gradient_is_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    def factor(*overrides: str) -> float:
        config = completed(*overrides)
        scale = LossScale(config)
        scale.measure(LENGTH)
        settings = policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
        assert settings is not None and (config.fspo.match_scale == "native") == bool(overrides)
        return scale.factor * settings.grad_multiplier

    assert factor() == pytest.approx(1 / 40)
    assert "grad_multiplier" not in capsys.readouterr().out
    assert factor(f"{LOSS}.grad_multiplier=0.025") == 0.025
    assert factor(f"{LOSS}.grad_multiplier=1.0") == 1, "1 counts, too"
    resumed = LossScale(completed(f"{LOSS}.grad_multiplier=0.025"))
    resumed.load_state_dict({"length": 40.0})
    assert resumed.factor == 1
