"""Types of settings: verl's own, this repository's and a user's dataclasses, the defaults', and ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import composed
from omegaconf import DictConfig
from verl.trainer.config import AlgoConfig
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, FSDPOptimizerConfig, RewardModelConfig, RolloutConfig

from recipe.fspo.job import choices
from recipe.fspo.rules import FspoSettings
from recipe.runner.launch.values import NULL_TOO, problem_of, types_of, value_problems

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def problems(override: str, base: DictConfig | None = None) -> list[str]:
    return list(value_problems(composed(*override.split()), base or composed()))


COMBINATIONS = {
    *((experiment, mode, "fspo") for experiment in choices("experiment") for mode in choices("mode")),
    *((experiment, "sync", algo) for experiment in ("demo", "qwen3_8b") for algo in choices("algo")),
}


@pytest.mark.parametrize(("experiment", "mode", "algo"), sorted(COMBINATIONS))
def test_nothing_that_is_shipped_is_refused(experiment: str, mode: str, algo: str) -> None:
    config = composed(f"experiment={experiment}", f"mode={mode}", f"algo={algo}")
    assert list(value_problems(config, config)) == []


def test_a_reference_is_checked_by_what_it_refers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENGTH", "many")
    (problem,) = problems(f"{ROLLOUT}.response_length=${{oc.env:LENGTH}} data.max_prompt_length=${{oc.env:LENGTH}}")
    assert problem.startswith("data.max_prompt_length=${oc.env:LENGTH} "), "a value of the environment is not shown"


def test_the_loss_of_a_user_is_typed_by_his_class(own_loss: Path) -> None:
    loss = ("hydra.searchpath=[conf]", "algo=fspo_power")
    config = composed(*loss, f"{ACTOR}.policy_loss.exponent=half")
    (problem,) = value_problems(config, composed(*loss))
    assert problem.startswith(f"{ACTOR}.policy_loss.exponent=half ") and "number" in problem


def test_what_the_classes_tell_wrongly_is_still_told_so() -> None:
    """Each exception: a default or a use of verl's that its own type does not allow."""
    optional = {
        "*.clip_ratio_low": FSDPActorConfig,
        "*.clip_ratio_high": FSDPActorConfig,
        "critic.forward_micro_batch_size*": FSDPCriticConfig,
        "reward.reward_model.rollout.mtp": RolloutConfig,
    }
    assert set(optional) == set(NULL_TOO) and RewardModelConfig
    for pattern, settings in optional.items():
        kind = types_of(settings)[pattern.rpartition(".")[2].rstrip("*")]
        assert (
            problem_of("any", None, kind) is not None and problem_of(pattern.replace("*", "critic"), None, kind) is None
        )
    assert problem_of("any", [0.9, 0.99], types_of(FSDPOptimizerConfig)["betas"]) is None, "YAML has no tuples"
    assert types_of(AlgoConfig)["gamma"] is float and types_of(FspoSettings)["kl_to_start"] is bool
