"""One update on a made-up batch: what fails in it is refused before Ray; by verl's own trainer's code."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray
import torch
from composing import composed
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.v1 import trainer_base

import fspo.verl  # noqa: F401  (registers the losses)
from recipe.fspo.rules import plain_problems
from recipe.runner.launch import trial
from recipe.runner.launch.trial import estimator_problems

#: Every estimator that verl registers, and whether its V1 trainer computes it. A new pin's new name belongs here.
COMPUTED = {
    **dict.fromkeys(("gae", "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"), True),
    **dict.fromkeys(("reinforce_plus_plus", "reinforce_plus_plus_baseline"), True),
    **dict.fromkeys(("remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"), False),
}
UIDS = ["a", "a", "b", "b"]


def nested(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.rand(length) for length in lengths], layout=torch.jagged)


def advantages(*overrides: str) -> torch.Tensor:
    """Of V1's own method, on a batch with every column that an estimator of verl's has a name for."""
    config = composed("run.dir=/nowhere", *overrides)
    response, prompt = [3, 2, 4, 3], [2, 2, 2, 2]
    names = ["rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "sum_pi_squared"]
    columns = {name: nested(*response) for name in (*names, "responses")} | {"prompts": nested(*prompt)}
    columns["response_mask"] = torch.nested.as_nested_tensor([torch.ones(n) for n in response], layout=torch.jagged)
    columns |= {"attention_mask": nested(*map(sum, zip(prompt, response, strict=True)))}
    columns |= {"reward_baselines": torch.rand(4), "format": torch.rand(4), "uid": NonTensorStack(*UIDS)}
    written: dict[str, Any] = {}

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return TensorDict({name: columns[name] for name in select_fields}, batch_size=4)

    def put(keys: list[str], partition_id: str, fields: TensorDict) -> None:
        written.update(fields)

    batch = KVBatchMeta(partition_id="train", keys=[f"{uid}_{i}_0" for i, uid in enumerate(UIDS)], tags=[{}] * 4)
    with mock.patch.object(trainer_base, "tq", SimpleNamespace(kv_batch_get=get, kv_batch_put=put)):
        trainer_base.PPOTrainer._compute_advantage(SimpleNamespace(config=config), batch, {})  # type: ignore[arg-type]
    return torch.as_tensor(written["advantages"].values())


def test_every_estimator_of_verl_is_decided_about() -> None:
    assert {name for name, of in ADV_ESTIMATOR_REGISTRY.items() if of.__module__.startswith("verl.")} == set(COMPUTED)


@pytest.mark.parametrize("estimator", COMPUTED)
def test_an_estimator_is_computed_by_verls_own_trainer_or_refused(estimator: str) -> None:
    chosen = [f"algorithm.adv_estimator={estimator}", "+algorithm.gdpo_reward_keys=[format]"]
    chosen.append("actor_rollout_ref.actor.calculate_sum_pi_squared=true")
    problems = list(estimator_problems(composed("run.dir=/nowhere", *chosen)))
    if COMPUTED[estimator]:
        assert problems == [] and advantages(*chosen).isfinite().all()
        return
    with pytest.raises((AssertionError, KeyError, TypeError)):
        advantages(*chosen)
    (problem,) = problems
    sentence, _, choices = problem.partition("choose one of ")
    assert f"algorithm.adv_estimator={estimator} " in sentence
    assert set(choices.split(", ")) == {name for name, computed in COMPUTED.items() if computed}


def test_plain_verl_says_so_for_a_loss_of_this_repository() -> None:
    chosen = ["algorithm.adv_estimator=remax", "trainer.v1.trainer_mode=sync"]
    (problem,) = plain_problems(composed("run.dir=/nowhere", *chosen))
    assert "algorithm.adv_estimator=remax " in problem and "rloo" in problem
    assert list(plain_problems(composed("run.dir=/nowhere", *chosen, "trainer.use_v1=false"))) == []
    assert list(plain_problems(composed("run.dir=/nowhere", "algo=grpo", *chosen))) == []


def test_an_estimator_of_the_users_is_left_to_him_and_a_typing_error_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from verl.trainer.ppo.core_algos import register_adv_est\n\n\n@register_adv_est('mine')\ndef mine(): ...\n"
    (tmp_path / "my_estimator.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("verl.trainer.ppo.core_algos.ADV_ESTIMATOR_REGISTRY", dict(ADV_ESTIMATOR_REGISTRY))
    library = ("run.dir=/nowhere", "actor_rollout_ref.model.external_lib=my_estimator")
    assert list(estimator_problems(composed(*library, "algorithm.adv_estimator=mine"))) == []
    (problem,) = estimator_problems(composed(*library, "algorithm.adv_estimator=mien"))
    assert "algorithm.adv_estimator=mien " in problem and "grpo" in problem


ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"


def test_what_verls_loss_can_compute_passes() -> None:
    for estimate in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3+"):
        chosen = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={estimate}", "run.dir=/nowhere"]
        assert list(trial.problems(composed(*chosen))) == []
    assert list(trial.problems(composed("run.dir=/nowhere", f"{ACTOR}.kl_loss_type=full"))) == []  # not used


LOSS = """
import torch
from verl.trainer.ppo.core_algos import register_policy_loss


@register_policy_loss("mine")
def mine({parameters}):
    {body}
    return (log_prob * advantages * response_mask).mean(){more}, {{}}
"""
VERLS = "old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights"


@pytest.mark.parametrize(
    ("parameters", "body", "more", "refused"),
    [
        (VERLS, "pass", "", None),
        ("log_prob, advantages, response_mask, **others", "pass", "", None),
        ("log_prob, advantages, response_mask", "pass", "", "old_log_prob"),
        (f"{VERLS}, temperature", "pass", "", "temperature"),
        (VERLS, "config.policy_loss.no_such_setting", "", "no_such_setting"),
        *(
            (VERLS, f"return {result}", "", "a dictionary of numbers")
            for result in (
                *("log_prob.sum()", "(log_prob.sum(),)", "(log_prob.sum(), {}, 0)", "None"),
                *("(log_prob.sum(1), {})", "(log_prob.sum().detach(), {})", "(1.0, {})", "({}, log_prob.sum())"),
                *("(log_prob.sum(), None)", "(log_prob.sum(), {'a': 'b'})", "(log_prob.sum(), {'a': torch.ones(2)})"),
            )
        ),
        (VERLS, "torch.distributed.get_rank(torch.distributed.new_group())", "", ""),
        (VERLS, "import ray; ray.get_actor('band')", "", ""),
        (VERLS, "torch.zeros(1, device='meta').item()", "", ""),
        (VERLS, "raise RuntimeError('ask a worker')", "", ""),
        (VERLS, "pass", " / 0 * log_prob.sum().log()", ""),
    ],
)
def test_a_loss_of_the_users_is_refused_for_its_arguments_settings_and_results_only(
    parameters: str,
    body: str,
    more: str,
    refused: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``refused``: what the sentence names; empty: a note, because a worker may have what is missing here."""
    (tmp_path / "my_trial_loss.py").write_text(LOSS.format(parameters=parameters, body=body, more=more))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY", registry := dict(POLICY_LOSS_REGISTRY))
    library = ["actor_rollout_ref.model.external_lib=my_trial_loss", f"{ACTOR}.policy_loss.loss_mode=mine"]
    problems = list(trial.problems(composed("run.dir=/nowhere", "algo=grpo", *library)))
    sys.modules.pop("my_trial_loss")
    assert "mine" in registry and not ray.is_initialized()
    error = capsys.readouterr().err
    assert len(problems) == bool(refused) and (f"{ACTOR}.policy_loss.loss_mode=mine" in error) == (refused == "")
    if refused:
        assert f"{ACTOR}.policy_loss.loss_mode=mine " in problems[0] and refused in problems[0]


@pytest.mark.parametrize("fails", ["raise RuntimeError('needs a GPU')", "parameters[0].use_muon"])
def test_an_optimizer_of_the_users_that_fails_here_is_a_note(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"class Mine:\n    def __init__(self, parameters, **_):\n        {fails}\n"
    (tmp_path / "my_trial_optimizer.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = [f"{ACTOR}.optim.optimizer_impl=my_trial_optimizer", f"{ACTOR}.optim.optimizer=Mine"]
    assert list(trial.problems(composed("run.dir=/nowhere", *chosen))) == []
    assert "optimizer_impl=my_trial_optimizer" in capsys.readouterr().err
