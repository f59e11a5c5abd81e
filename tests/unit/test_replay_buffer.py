"""What the length funnel counts of verl's replay buffer and of the batches that are trained on: the model's tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from recipe.fspo.accounting import replay_buffer
from recipe.fspo.accounting.funnel import LengthFunnel
from recipe.fspo.accounting.outcomes import Outcomes
from recipe.fspo.accounting.replay_buffer import counting, train_on

#: Three responses to two prompts, of which an agent has written one in two rows, and a tool a part of each.
MASKS = {"a_0_0": [1, 0, 0, 1], "a_0_1": [0, 1], "a_1_0": [1, 1, 1, 0], "b_0_0": [0, 0, 0, 1]}


def test_what_is_removed_counts_by_the_models_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[str] = []

    def read(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
        assert not cleared, "afterwards they are gone"
        rows = [torch.tensor(MASKS[key]) for key in keys]
        return {"response_mask": torch.nested.nested_tensor(rows, layout=torch.jagged)}

    monkeypatch.setattr(replay_buffer.tq, "kv_batch_get", read)
    monkeypatch.setattr(replay_buffer.tq, "kv_clear", lambda keys, partition_id: cleared.extend(keys))
    sampler = {"max_off_policy_threshold": 2, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}
    funnel = LengthFunnel()
    buffer = counting(ReplayBufferAsync("separate_async", {}, **sampler), funnel, 2, {})
    buffer.partitions["train"] |= {key: {"response_len": len(mask)} for key, mask in MASKS.items()}
    funnel.start(4)
    buffer._evict_terminal_groups(3, "train", ({"a"}, set(), {"b"}, Counter()))
    metrics, record = funnel.end_step(1)
    assert (record["tokens"]["stale"], record["tokens"]["failed"]) == (3 + 3, 1)
    assert (metrics["fspo/funnel/stale"], metrics["fspo/funnel/failed"]) == (2, 2)  # one of b never came
    assert metrics["fspo/funnel/length_lost"] == pytest.approx(7 / 3)
    assert set(cleared) == {"a", "b", *MASKS}


def test_a_rollout_batch_has_the_data_loader_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl hands out the groups in the order in which they ended; ``d``, from before a resume, comes first."""
    monkeypatch.setattr(replay_buffer.tq, "kv_clear", lambda **_: None)
    position = {"a": 1, "b": 0, "c": 2, "later": 3}
    sampler = {"max_off_policy_threshold": 2, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}
    buffer = counting(ReplayBufferAsync("separate_async", {}, **sampler), LengthFunnel(), 1, position)
    ended = {f"{prompt}_{index}_0": {"response_len": 1} for prompt in "cadb" for index in range(2)}
    batch = buffer._materialize_batch("train", ["a", "b", "c", "d"], ended)
    assert batch.keys == [f"{prompt}_{index}_0" for prompt in "dbac" for index in range(2)]
    assert position == {"later": 3}


def test_what_is_trained_on_counts_by_the_models_tokens() -> None:
    tag = {"response_len": 4, "global_steps": 1, "min_global_steps": 1, "max_global_steps": 2}
    batch = KVBatchMeta([*MASKS, "pad_0_0"], [tag] * 4 + [tag | {"is_padding": True}], "train")
    length_B = torch.tensor([sum(mask) for mask in MASKS.values()])
    outcomes = Outcomes([*MASKS], length_B, length_B, torch.zeros(4), ["math"] * 4, [{}] * 4)
    funnel = LengthFunnel()
    funnel.start(3)
    train_on(funnel, batch, outcomes, step=3)
    metrics, record = funnel.end_step(3)
    assert record["tokens"]["trained"] == 7 and metrics["fspo/funnel/trained"] == 3
    assert metrics["fspo/funnel/length_trained"] == pytest.approx(7 / 3)
    assert (metrics["fspo/funnel/staleness"], metrics["fspo/funnel/versions"]) == (2, 2)


def test_a_buffer_of_ones_own_is_left_alone() -> None:
    class Mine(ReplayBufferAsync):  # type: ignore[misc]
        """As ``trainer.v1.sampler.custom_sampler`` names one: verl asks for a subclass of its own."""

        def _select_prompt_uids(self, *_: object) -> str:
            return "mine"

    mine = Mine("separate_async", {}, max_off_policy_threshold=2, max_off_policy_strategy="drop", sampler_kwargs={})
    assert counting(mine, LengthFunnel(), 2, {}) is mine
    assert mine._select_prompt_uids("train", set(), 2) == "mine"
