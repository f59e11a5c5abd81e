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


COMBINATIONS = [
    *((experiment, mode, "fspo") for experiment in choices("experiment") for mode in choices("mode")),
    *((experiment, "sync", algo) for experiment in ("demo", "qwen3_8b") for algo in choices("algo")),
]


@pytest.mark.parametrize(("experiment", "mode", "algo"), COMBINATIONS)
def test_nothing_that_is_shipped_is_refused(experiment: str, mode: str, algo: str) -> None:
    config = composed(f"experiment={experiment}", f"mode={mode}", f"algo={algo}")
    assert list(value_problems(config, config)) == []


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        # a verl dataclass tells
        (f"{ROLLOUT}.n=2.5", "integer"),
        (f"{ACTOR}.use_kl_loss=Flase", "true or false"),
        (f"{ROLLOUT}.temperature=hot", "number"),
        (f"{ACTOR}.ppo_epochs=1.5", "integer"),
        (f"{ROLLOUT}.enforce_eager=1", "true or false"),
        (f"{ACTOR}.optim.lr=abc", "number"),
        (f"{ACTOR}.entropy_coeff=none", "number"),
        (f"{ACTOR}.entropy_coeff=null", "number"),
        (f"{ROLLOUT}.enable_chunked_prefill=yes", "true or false"),
        (f"{ACTOR}.optim.betas=0.9", "list of float, float"),
        (f"{ACTOR}.optim.betas=[0.9]", "list of float, float"),
        (f"{ACTOR}.optim=3", "dictionary"),
        (f"{ACTOR}=null", "dictionary"),
        (f"{ACTOR}.ppo_mini_batch_size=64.0", "integer"),
        (f"{ACTOR}.checkpoint.save_contents=model", "list"),
        (f"{ROLLOUT}.max_model_len=None", "integer"),
        (f"{ROLLOUT}.n='8'", "integer"),
        (f"{ROLLOUT}.temperature=[1.0]", "number"),
        (f"{ROLLOUT}.temperature={{a:1}}", "number"),
        ("actor_rollout_ref.model.use_remove_padding=Ture", "true or false"),
        ("algorithm.gamma=one", "number"),
        ("algorithm.lam=null", "number"),
        ("critic.ppo_epochs=two", "integer"),
        # this repository's
        (f"{ACTOR}.policy_loss.c_low=abc", "number"),
        ("run.log=few", "'headline' or 'all'"),
        # a range
        ("actor_rollout_ref.model.lora_rank=-1", "0"),
        ("seed=-1", "0"),
        ("trainer.save_freq=null", "integer"),
        ("trainer.logger=[1]", "string"),
        # the default
        ("evaluate=ture", "true or false"),
        ("trainer.val_before_train=no", "true or false"),
        ("data.shuffle=0", "true or false"),
        ("data.shuffle=null", "true or false"),
        ("data.train_max_samples=1.5", "integer"),
        ("data.prompt_key=[a]", "string"),
        ("data=3", "dictionary"),
        ("trainer.v1=sync", "dictionary"),
        ("trainer.experiment_name=[a,b]", "string"),
        ("trainer.v1.sampler.max_off_policy_threshold=eight", "integer"),
        ("fspo.kl_to_start=2", "true or false"),
    ],
)
def test_a_value_of_another_kind_is_named(override: str, wanted: str) -> None:
    (problem,) = problems(override)
    key, _, value = override.partition("=")
    start, _, rest = problem.partition(" must be ")
    assert start.startswith(f"{key}=") and wanted in rest
    assert start.endswith(f"={value}") or not value.strip("'").isalnum() or f"'{start.partition('=')[2]}'" == value


@pytest.mark.parametrize(
    "override",
    [
        "algo=gmpo actor_rollout_ref.actor.clip_ratio_low=null",
        "data.train_files=[a,b]",
        "data.val_files=null",
        "data.seed=null",
        "data.filter_overlong_prompts_workers=null",
        "trainer.logger=console",
        "trainer.experiment_name=2026",
        "trainer.total_training_steps=10",
        "algorithm.gamma=1",
        "algorithm.rollout_correction=null",
        "algorithm.rollout_correction.rollout_is_threshold='0.5_2.0'",
        f"{ACTOR}.optim.betas=[0.9,0.95]",
        f"{ACTOR}.ppo_mini_batch_size=${{data.train_batch_size}}",
        f"{ROLLOUT}.max_model_len=null",
        "+reward.custom_reward_function.reward_kwargs={a:1}",
        "+data.mine=3",
    ],
)
def test_what_verl_takes_passes(override: str) -> None:
    assert problems(override) == []


def test_a_reference_is_checked_by_what_it_refers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENGTH", "many")
    (problem,) = problems(f"{ROLLOUT}.response_length=${{oc.env:LENGTH}} data.max_prompt_length=${{oc.env:LENGTH}}")
    assert problem.startswith("data.max_prompt_length=many ")


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
