"""Responses without a gradient: which they are, and that A is exactly 0 there, by verl's own trainer's code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composing import composed
from queue_in_memory import Queue
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from recipe.fspo import zero_advantage
from recipe.fspo.config import GROUP_ESTIMATORS
from recipe.fspo.trainer import FSPOTrainer

#: Rewards of eight responses to each prompt.
REWARDS = {"tenth": [0.1] * 8, "mixed": [0.7] * 7 + [0.1], "tenths": [0.7] * 8}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    for module in (trainer_base, zero_advantage):
        monkeypatch.setattr(module, "tq", queue)
    return queue


def put(queue: Queue, rewards: dict[str, list[float]]) -> KVBatchMeta:
    """Responses of 2, 3, ... tokens, with the reward at the last; as verl's agent loop puts them."""
    keys, tags = [], []
    for prompt, of_prompt in rewards.items():
        for index, reward in enumerate(of_prompt):
            length, key = 2 + index, f"{prompt}_{index}_0"
            scores = torch.zeros(length)
            scores[-1] = reward
            mask = torch.ones(length, dtype=torch.int64)
            row = {"uid": prompt, "rm_scores": scores, "response_mask": mask, "old_log_probs": -torch.rand(length)}
            queue.rows[key] = row | {"loss_mask": mask, "responses": mask.clone(), "prompts": torch.ones(3).long()}
            keys.append(key)
            tags.append({"response_len": length, "prompt_len": 3, "seq_len": length + 3, "global_steps": 1})
    return KVBatchMeta(keys, tags, "train")


def advantages(queue: Queue, rewards: dict[str, list[float]], *overrides: str) -> dict[str, torch.Tensor]:
    batch = put(queue, rewards)
    trainer = FSPOTrainer(composed("run.dir=/nowhere", *overrides))
    trainer._compute_advantage(batch, {})
    return {key: queue.rows[key]["advantages"] for key in batch.keys}


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_is_exactly_0_where_all_rewards_of_a_prompt_are_equal(queue: Queue, estimator: str) -> None:
    setting = f"algorithm.adv_estimator={estimator}"
    rows = advantages(queue, REWARDS, setting)
    assert all(not rows[f"{prompt}_{i}_0"].any() for prompt in ("tenth", "tenths") for i in range(8))
    of_verl = put(queue, REWARDS)
    trainer_base.PPOTrainer._compute_advantage(SimpleNamespace(config=composed("run.dir=/x", setting)), of_verl, {})  # type: ignore[arg-type]
    assert all(rows[f"mixed_{i}_0"].equal(queue.rows[f"mixed_{i}_0"]["advantages"]) for i in range(8))
    assert rows["mixed_7_0"].any() or estimator == "grpo_passk"
    if estimator == "grpo":  # what the change is for
        assert [float(queue.rows[f"{prompt}_0_0"]["advantages"][0].abs()) for prompt in ("tenth", "tenths")] == [
            pytest.approx(0.0074, abs=1e-4),
            pytest.approx(0.056, abs=1e-3),
        ]


def test_other_advantages_stay_as_verl_computes_them(queue: Queue) -> None:
    """A single response has no group, one response in two rows is one, and other estimators compare nothing."""
    rewards = {"alone": [0.7], "equal": [0.7, 0.7], "nan": [float("nan")] * 2}
    batch = put(queue, rewards)
    assert zero_advantage.equal_rewards(batch) == ["equal_0_0", "equal_1_0"]
    two_rows = KVBatchMeta(["equal_0_0", "equal_0_1"], batch.tags[1:3], "train")
    queue.rows["equal_0_1"] = queue.rows["equal_1_0"]
    assert zero_advantage.equal_rewards(two_rows) == []
    whitened = advantages(queue, {"a": [0.7, 0.7], "b": [0.7, 0.1]}, "algorithm.adv_estimator=reinforce_plus_plus")
    assert all(row.any() for row in whitened.values())


def test_padding_has_no_reward_of_its_own(queue: Queue) -> None:
    batch: Any = put(queue, {"a": [0.0, 0.0], "pad": [0.0, 0.0]})
    batch.tags[2]["is_padding"] = batch.tags[3]["is_padding"] = True
    assert zero_advantage.equal_rewards(batch) == ["a_0_0", "a_1_0"]
