"""The order in which verl's replay buffer hands out prompts, and what is written of those that it evicts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from queue_in_memory import Queue
from verl.trainer.ppo.v1 import replay_buffer as of_verl
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from fspo.files import read_lines
from recipe.fspo import replay_buffer
from recipe.fspo.replay_buffer import ENDS_FILE, ordered

#: Three responses to two prompts, of which an agent has written one in two rows, and a tool a part of each.
MASKS = {"a_0_0": [1, 0, 0, 1], "a_0_1": [0, 1], "a_1_0": [1, 1, 1, 0], "b_0_0": [0, 0, 0, 1]}
SAMPLER = {"max_off_policy_threshold": 2, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}


def buffer_in(folder: Path, kind: type[Any] = ReplayBufferAsync) -> Any:
    return ordered(kind("separate_async", {}, **SAMPLER), folder / ENDS_FILE, 2)


def test_what_is_evicted_has_a_line_with_its_lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the model's tokens, over the rows of a response; of one that never came nobody knows the length."""
    queue = Queue()
    queue.rows = {key: {"response_mask": torch.tensor(mask)} for key, mask in MASKS.items()} | {"a": {}, "b": {}}
    for module in (replay_buffer, of_verl):
        monkeypatch.setattr(module, "tq", queue)
    buffer = buffer_in(tmp_path)
    buffer.partitions["train"] |= {key: {"response_len": len(mask)} for key, mask in MASKS.items()}
    buffer._evict_terminal_groups(3, "train", ({"a"}, set(), {"b"}, Counter()))
    assert read_lines(tmp_path / ENDS_FILE) == [
        {"step": 3, "reason": "failed", "lengths": [1, None]},
        {"step": 3, "reason": "stale", "lengths": [3, 3]},
    ]
    assert queue.rows == {}


def test_a_rollout_batch_has_the_data_loader_s_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """verl hands out the groups in the order in which they ended; names sort in the data loader's."""
    monkeypatch.setattr(replay_buffer.tq, "kv_clear", lambda **_: None)
    buffer = buffer_in(tmp_path)
    ended = {f"{prompt}_{index}_0": {"response_len": 1} for prompt in "cadb" for index in range(2)}
    batch = buffer._materialize_batch("train", ["a", "b", "c", "d"], ended)
    assert batch.keys == [f"{prompt}_{index}_0" for prompt in "abcd" for index in range(2)]
    assert read_lines(tmp_path / ENDS_FILE) == []
    del ended["b_1_0"]
    buffer._materialize_batch("train", ["a", "b", "c", "d"], ended)
    assert read_lines(tmp_path / ENDS_FILE) == [{"step": 0, "reason": "failed", "lengths": [None]}]
    buffer.prompt_global_steps["train"] |= {"b": 1, "z": 1, "a": 2}
    assert buffer._select_prompt_uids("train", {"a", "b", "z"}, 2)[0] == ["b", "z"], "the oldest, and then by name"


def test_a_buffer_of_ones_own_is_left_alone(tmp_path: Path) -> None:
    """As ``trainer.v1.sampler.custom_sampler`` names one: verl asks for a subclass of its own."""
    mine = type("Mine", (ReplayBufferAsync,), {"_select_prompt_uids": lambda *_: "mine"})
    assert buffer_in(tmp_path, mine)._select_prompt_uids("train", set(), 2) == "mine"
