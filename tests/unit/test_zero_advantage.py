"""Responses without a gradient: which they are, and that A is exactly 0 there, by verl's own trainer's code."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from composing import completed, composed
from queue_in_memory import Queue
from transfer_queue import KVBatchMeta
from updates import updates
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import trainer_base

from fspo.table import as_rows, read_table
from recipe.fspo import rollout_batch, zero_advantage
from recipe.fspo import trainer as trainer_module
from recipe.fspo.checks import problems
from recipe.fspo.config import GROUP_ESTIMATORS, complete
from recipe.fspo.recorder import MiniBatch
from recipe.fspo.rollout_batch import read_outcomes
from recipe.fspo.trainer import FSPOHooks, FSPOTrainer

#: Rewards of eight responses to each prompt.
REWARDS = {"tenth": [0.1] * 8, "mixed": [0.7] * 7 + [0.1], "tenths": [0.7] * 8}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    for module in (trainer_base, trainer_module, zero_advantage, rollout_batch, padding_utils):
        monkeypatch.setattr(module, "tq", queue)
    return queue


def put(queue: Queue, rewards: dict[str, list[float]]) -> KVBatchMeta:
    """Responses of 2, 3, ... tokens, with the reward at the last; as verl's agent loop puts them.

    A tool has written the first token of each prompt's second response.
    """
    keys, tags = [], []
    for prompt, of_prompt in rewards.items():
        for index, reward in enumerate(of_prompt):
            length, key = 2 + index, f"{prompt}_{index}_0"
            scores, mask = torch.zeros(length), torch.ones(length, dtype=torch.int64)
            scores[-1], mask[0] = reward, index != 1
            row = {"extra_fields": {"reward_extra_info": {}}, "data_source": "math", "uid": prompt}
            row |= {"rm_scores": scores, "response_mask": mask, "old_log_probs": -torch.rand(length)}
            queue.rows[key] = row | {"loss_mask": mask, "responses": mask.clone(), "prompts": torch.ones(3).long()}
            keys.append(key)
            tags.append({"response_len": length, "prompt_len": 3, "seq_len": length + 3, "global_steps": 1})
    queue.tags |= dict(zip(keys, tags, strict=True))
    return KVBatchMeta(keys, tags, "train")


def trainer_of(*overrides: str) -> FSPOTrainer:
    trainer = FSPOTrainer(completed("trainer.default_local_dir=/nowhere", *overrides))
    trainer.global_steps, trainer.total_training_steps = 3, 9
    return trainer


def advantages(queue: Queue, rewards: dict[str, list[float]], *overrides: str) -> dict[str, torch.Tensor]:
    batch, trainer = put(queue, rewards), trainer_of("fspo.skip_zero_advantage=false", *overrides)
    with mock.patch.object(trainer_base.PPOTrainer, "_balance_batch"):
        FSPOHooks._balance_batch(trainer, batch, {})
    trainer._compute_advantage(batch, {})
    return {key: queue.rows[key]["advantages"] for key in batch.keys}


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_is_exactly_0_where_all_rewards_of_a_prompt_are_equal(queue: Queue, estimator: str) -> None:
    setting = f"algorithm.adv_estimator={estimator}"
    rows = advantages(queue, REWARDS, setting)
    assert all(not rows[f"{prompt}_{i}_0"].any() for prompt in ("tenth", "tenths") for i in range(8))
    of_verl = SimpleNamespace(config=composed("trainer.default_local_dir=/x", setting))
    trainer_base.PPOTrainer._compute_advantage(of_verl, put(queue, REWARDS), {})  # type: ignore[arg-type]
    assert all(rows[f"mixed_{i}_0"].equal(queue.rows[f"mixed_{i}_0"]["advantages"]) for i in range(8))
    assert rows["mixed_7_0"].any() or estimator == "grpo_passk"
    if estimator == "grpo":  # what the change is for
        of_equal = [float(queue.rows[f"{prompt}_0_0"]["advantages"][0].abs()) for prompt in ("tenth", "tenths")]
        assert of_equal == [pytest.approx(0.0074, abs=1e-4), pytest.approx(0.056, abs=1e-3)]


def test_other_advantages_stay_as_verl_computes_them(queue: Queue) -> None:
    """A single response has no group, one response in two rows is one, and other estimators compare nothing."""
    batch = put(queue, {"alone": [0.7], "equal": [0.7, 0.7], "nan": [float("nan")] * 2})
    assert [*zero_advantage.equal_rewards(read_outcomes(batch))] == ["equal_0_0", "equal_1_0"]
    two_rows = KVBatchMeta(["equal_0_0", "equal_0_1"], batch.tags[1:3], "train")
    queue.rows["equal_0_1"] = queue.rows["equal_1_0"]
    assert zero_advantage.equal_rewards(read_outcomes(two_rows)) == {}
    whitened = advantages(queue, {"a": [0.7, 0.7], "b": [0.7, 0.1]}, "algorithm.adv_estimator=reinforce_plus_plus")
    assert all(row.any() for row in whitened.values())


class Workers:
    """Of one rank: log-probabilities that say how many tokens each row has, and what an update was called with."""

    def __init__(self, queue: Queue) -> None:
        self._dispatch_info = {"actor": [0]}
        self.queue, self.passes, self.updates = queue, list[list[str]](), list[Any]()

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        assert batch.extra_info["mini_batch_size"] == 8, "as in the updates"
        self.passes.append(batch.keys)
        for key in batch.keys:
            length = len(self.queue.rows[key]["input_ids"])
            self.queue.rows[key] |= {"log_probs": -torch.ones(length), "entropy": torch.ones(length)}
        return batch

    def begin_update(self, state: Any, step: int, scale: float) -> None:
        self.scale = scale

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        read = self.queue.kv_batch_get(batch.keys, "train", batch.fields)
        self.updates.append((batch.keys, {name: read[name] for name in ("input_ids", "loss_mask", "fspo_rows")}))
        self.columns = batch.fields
        return {"metrics": {"mfu": 0.0}}

    def pop_mini_batches(self) -> list[list[MiniBatch]]:
        """As the workers record two mini-batches of eight: a row that stands in for a response has no token."""
        columns = self.updates[-1][1]
        own_B = np.array([len(tokens) > 2 for tokens in columns["input_ids"].unbind()])
        rows = as_rows({"S": np.where(own_B, 1.0, np.nan), "L": own_B, "A": own_B})
        rows["row"] = torch.stack(columns["fspo_rows"].unbind()).flatten().numpy()
        parts = ({name: column[part] for name, column in rows.items()} for part in (slice(0, 8), slice(8, 16)))
        return [[MiniBatch(part, 1.0, 1e-6) for part in parts]]


def one_step(
    queue: Queue, folder: Path, rewards: dict[str, list[float]], *overrides: str
) -> tuple[Any, KVBatchMeta, Workers]:
    """verl's own methods, in its order, from the sample to the metrics of the update."""
    settings = ["fspo.clip_values=published", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4"]
    settings += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", f"trainer.default_local_dir={folder}"]
    trainer = trainer_of(*settings, *overrides)
    trainer.actor_rollout_wg = workers = Workers(queue)
    trainer.tokenizer = SimpleNamespace(eos_token_id=1, decode=str)
    batch, metrics = put(queue, rewards), dict[str, Any]()
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        tokens = {name: torch.arange(tag["seq_len"]) for name in ("input_ids", "position_ids")}
        del queue.rows[key]["old_log_probs"]
        queue.rows[key] |= tokens | {"rollout_log_probs": -torch.ones(tag["response_len"])}
    for method in ("_balance_batch", "_compute_old_log_prob", "_compute_advantage", "_update_actor"):
        batch = getattr(trainer, method)(batch, metrics)
        if method == "_compute_advantage":  # verl's rollout correction may have rejected a response
            queue.rows["a_1_0"]["response_mask"] = torch.zeros(3, dtype=torch.int64)
    return metrics, trainer._padding.removed(batch), workers


FOUR = {"b": [0.7] * 4, "c": [0.0] * 4, "d": [1.0] * 4, "a": [1.0, 0.0, 0.0, 0.0]}


def test_padding_takes_the_places_of_rows_without_a_gradient(queue: Queue, tmp_path: Path) -> None:
    """Counts and mini-batches stay, divisors are those of all tokens of the model, and rows are there for all else."""
    metrics, batch, workers = one_step(queue, tmp_path, FOUR)
    assert sorted(batch.keys) == sorted(f"{prompt}_{i}_0" for prompt in FOUR for i in range(4))
    (passed,), ((updated, columns),) = workers.passes, workers.updates
    assert passed == updated and len(updated) == 16
    # Without a selection, verl would send what describes the prompt, and copy it for every micro-batch.
    assert not {"extra_fields", "data_source", "uid"} & {*workers.columns} and "advantages" in workers.columns
    left_out = [place for place, key in enumerate(batch.keys) if key not in updated]
    assert [batch.keys[place][0] for place in left_out].count("a") == 0 and len(left_out) == 12
    lengths = [len(row) for row in columns["input_ids"].unbind()]
    assert [lengths[place] for place in left_out] == [2] * 12
    lengths = {key: tag["response_len"] for key, tag in zip(batch.keys, batch.tags, strict=True)}
    assert {key: len(queue.rows[key]["advantages"]) for key in lengths} == lengths
    of_model = {key: length - (key[1:] == "_1_0") for key, length in lengths.items()}
    assert [int(row.sum()) for row in columns["loss_mask"].unbind()] == [*of_model.values()]
    assert workers.scale == pytest.approx(16 / sum(of_model.values()))
    assert set(queue.rows) == set(batch.keys), "padding goes"
    table = read_table(tmp_path / "responses")
    assert len(table) == 4 and table.left_out == 0 and not table.problems
    frame = pd.read_parquet(tmp_path / "responses")
    without_s = frame[frame["S"].isna()]
    assert sorted(frame["id"]) == sorted(batch.keys) and len(without_s) == 12 and (without_s["A"] == 0).all()
    assert dict(zip(without_s["id"], without_s["L"], strict=True)).items() <= of_model.items(), "of the response"
    assert 0 < metrics["fspo/advantage_zero_frac"] < 1


def test_rows_stay_where_something_needs_them(queue: Queue, tmp_path: Path) -> None:
    """Where it is off, where the distance to the start is measured, and a group of a batch without any gradient."""
    _, batch, workers = one_step(queue, tmp_path / "off", FOUR, "fspo.skip_zero_advantage=false")
    assert workers.updates[0][0] == batch.keys
    _, batch, workers = one_step(queue, tmp_path / "validates", FOUR, "trainer.test_freq=3")
    assert workers.passes[0] == batch.keys
    _, batch, workers = one_step(queue, tmp_path / "equal", {prompt: [0.7] * 4 for prompt in FOUR})
    assert len({*workers.passes[0]} & {*batch.keys}) == 4


CORRECTION = "algorithm.rollout_correction.rollout_is"


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ("actor_rollout_ref.actor.use_kl_loss=true", "use_kl_loss=true"),
        ("algorithm.use_kl_in_reward=true", "use_kl_in_reward=true"),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "entropy_coeff=0.01"),
        ("critic.enable=true", "critic.enable=true"),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
        ("algo=grpo", "loss_mode=vanilla"),
        ("algo=grpo actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "loss_mode=geo_mean"),
        (f"{CORRECTION}=sequence {CORRECTION}_batch_normalize=true", "rollout_is_batch_normalize=true"),
        *((f"algo={algo}", None) for algo in ("fspo", "gspo", "rloo")),
    ],
)
def test_rows_are_left_out_where_that_changes_no_gradient(words: str, counts: str | None) -> None:
    """By default; to ask for it where such rows count is refused."""
    config = composed("trainer.default_local_dir=/nowhere", *words.split())
    config.fspo.skip_zero_advantage = True
    refused = [problem for problem in problems(config) if "fspo.skip_zero_advantage=true" in problem]
    assert len(refused) == bool(counts) and all(str(counts) in problem for problem in refused)
    config.fspo.skip_zero_advantage = None
    assert not [problem for problem in problems(config) if "skip_zero_advantage" in problem]
    complete(config)
    assert config.fspo.skip_zero_advantage is (counts is None)


@pytest.mark.slow
def test_the_gradient_is_that_with_all_rows(tmp_path: Path) -> None:
    """By verl's engine: bit for bit with a row in each pack, else but for rounding; a mini-batch has nothing left."""
    results = updates(tmp_path, "gradient")
    assert len(results) == 6
    for result in results:
        assert result["largest"] > 0 and result["second"] == 0 and result["off"] < 1e-4, result
        assert result["off"] == 0 or not result["alone"], result
        assert result["rows"] == [[8, 8], [4, 0]], result
