"""What verl computes first after a rollout: by its own trainer's code, and refused before Ray where that fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from composing import composed
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1 import trainer_base

from recipe.fspo.config import plain_problems
from recipe.runner.launch import first_update
from recipe.runner.launch.checks import advantage_problems

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
    problems = list(advantage_problems(composed("run.dir=/nowhere", *chosen)))
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
    assert list(advantage_problems(composed(*library, "algorithm.adv_estimator=mine"))) == []
    (problem,) = advantage_problems(composed(*library, "algorithm.adv_estimator=mien"))
    assert "algorithm.adv_estimator=mien " in problem and "mine" in problem


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=full", (f"{ACTOR}.kl_loss_type=full ", "low_var_kl, k3")),
        ("algorithm.use_kl_in_reward=true algorithm.kl_penalty=k9", ("algorithm.kl_penalty=k9 ", "low_var_kl, k3")),
        (f"algo=grpo {ACTOR}.policy_loss.loss_mode=dro", ("policy_loss.loss_mode=dro ", "policy_loss.dro_beta")),
    ],
)
def test_what_verls_loss_cannot_compute_is_named(overrides: str, says: tuple[str, ...]) -> None:
    (problem,) = first_update.problems(composed("run.dir=/nowhere", *overrides.split()))
    assert all(part in problem for part in says), problem


def test_what_verls_loss_can_compute_passes() -> None:
    for estimate in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3+"):
        chosen = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={estimate}", "run.dir=/nowhere"]
        assert list(first_update.problems(composed(*chosen))) == []
    assert list(first_update.problems(composed("run.dir=/nowhere", f"{ACTOR}.kl_loss_type=full"))) == []  # not used
