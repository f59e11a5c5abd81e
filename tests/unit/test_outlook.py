"""What a run's clip values would leave outside at its own lengths, in a plan and a dry run."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from composing import composed
from verl.workers.config import ActorConfig

from recipe.fspo.outlook import outlook


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        # 44%, 54% and 79% are those of the command with these lengths and sigma=0.036.
        ((), ("c_low=0.03", "2000 and 8192 tokens", "54%, 79% if the policy moves", "40%, 40% if S is")),
        (("algo=fspo_v1",), ("40%, 40% if the policy moves",)),
        (("algo=gspo",), ("c_low=0.0003 c_high=0.0004 nats per token^1", "76%, 81% if the policy moves")),
        (("actor_rollout_ref.actor.policy_loss.c_low=0.07",), ("c_low=0.07",)),
        (("run.mean_response=null", "data.max_response_length=1024"), ("512 and 1024 tokens",)),
    ],
)
def test_a_job_names_its_clip_values_and_what_they_would_leave_outside(
    overrides: tuple[str, ...], says: tuple[str, ...]
) -> None:
    lines = list(outlook(composed("experiment=qwen3_8b", "fspo.clip_values=published", *overrides)))
    assert len(lines) == 2
    for words in says:
        assert words in "\n".join(lines)


def test_a_job_that_measures_its_clip_values_says_from_when_on() -> None:
    (line,) = outlook(composed("experiment=qwen3_8b"))
    assert "full learning rate" in line and "85%" in line


def test_another_mean_over_tokens_than_verls_default_is_named() -> None:
    default = next(field.default for field in dataclasses.fields(ActorConfig) if field.name == "loss_agg_mode")
    for algo in ("grpo", "gspo_verl"):
        (line,) = outlook(composed("experiment=own", f"algo={algo}"))
        assert "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean" in line and default in line
        key = f"actor_rollout_ref.actor.loss_agg_mode={default}"
        assert list(outlook(composed("experiment=own", f"algo={algo}", key))) == []


@pytest.mark.parametrize("loss", ["sapo", "geo_mean"])
def test_a_loss_with_a_mean_of_its_own_has_no_line(loss: str) -> None:
    assert list(outlook(composed("experiment=own", f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"))) == []


def test_a_loss_of_the_users_that_does_not_read_the_mean_has_no_line(own_loss: Path) -> None:
    importlib.import_module("my_loss")
    assert list(outlook(composed("hydra.searchpath=[conf]", "experiment=own", "algo=fspo_power"))) == []


def test_a_loss_that_this_process_has_not_registered_has_no_line(own_loss: Path) -> None:
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=a_loss_of_nobody"
    assert list(outlook(composed("experiment=own", "algo=grpo", loss))) == []


@pytest.mark.parametrize("algo", ["unclipped", "fspo_quantile", "dapo"])
def test_a_loss_without_clip_values_of_a_band_has_no_line(algo: str) -> None:
    assert list(outlook(composed("experiment=qwen3_8b", f"algo={algo}"))) == []
