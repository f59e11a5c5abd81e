"""What the trainer reads of a step's responses: masks and one value each, and the same as from their tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from fspo.diagnostics import LengthDiagnostics
from recipe.fspo.accounting import outcomes
from recipe.fspo.accounting.outcomes import (
    Outcomes,
    kl_to_start,
    lengths_and_ends,
    outcome_columns,
    outcome_metrics,
    read_outcomes,
    read_responses,
)
from recipe.fspo.recorder import end_of_response

TOKENS = {"a_0_0": [5, 6, 7], "a_1_0": [5, 6, 7], "b_0_0": [8], "b_1_0": [8, 9]}
REWARD = {"a_0_0": 1.0, "a_1_0": 1.0, "b_0_0": 0.0, "b_1_0": 0.5}


class Queue:
    """TransferQueue's read of these rows; notes the columns."""

    def __init__(self, reported: bool, by_tool: int = 0) -> None:
        self.read: set[str] = set()
        self._reported, self._by_tool = reported, by_tool

    def column(self, name: str, keys: list[str]) -> Any:
        if name == "data_source":
            return ["math"] * len(keys)
        if name == "extra_fields":
            return [{"raw_prompt": "?", "reward_extra_info": self._info(key)} for key in keys]
        rows = {
            "responses": lambda key: torch.tensor(TOKENS[key]),
            "response_mask": lambda key: torch.tensor([int(i >= self._by_tool) for i in range(len(TOKENS[key]))]),
            "rm_scores": lambda key: torch.tensor([0.0] * (len(TOKENS[key]) - 1) + [REWARD[key]]),
        }
        return torch.nested.nested_tensor([rows[name](key) for key in keys], layout=torch.jagged)

    def _info(self, key: str) -> dict[str, Any]:
        ours = {"score": REWARD[key], "problem_id": "a", "response_length": len(TOKENS[key])}
        return {"acc": float(REWARD[key] == 1)} | (ours if self._reported else {"score": 7.0})

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        self.read |= set(select_fields)
        return {name: self.column(name, keys) for name in select_fields}


def read(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Outcomes:
    monkeypatch.setattr(outcomes.tq, "kv_batch_get", queue.kv_batch_get)
    tags = [{"response_len": len(tokens)} for tokens in TOKENS.values()]
    padding = {"response_len": 1, "is_padding": True}
    return read_outcomes(KVBatchMeta([*TOKENS, "pad_0_0"], [*tags, padding], "train"))


def test_no_tokens_are_read_but_their_mask_and_the_metrics_are_those_of_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported, untold = Queue(reported=True), Queue(reported=False)
    metrics = [
        outcome_metrics(rows, LengthDiagnostics(window=1))
        for rows in (read(reported, monkeypatch), read(untold, monkeypatch))
    ]
    assert reported.read == {"extra_fields", "data_source", "response_mask"}
    assert untold.read == reported.read | {"rm_scores"}
    assert metrics[0] == metrics[1]


masks = st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=9)


@settings(max_examples=100)
@given(masks)
def test_lengths_count_the_models_tokens(rows: list[list[int]]) -> None:
    nested = torch.nested.nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)
    length_B, end_B = lengths_and_ends(nested)
    assert length_B.dtype == torch.int64
    assert length_B.tolist() == [sum(row) for row in rows]
    assert end_B.tolist() == end_of_response(nested.to_padded_tensor(0, (len(rows), 9))).tolist()


def test_what_others_have_written_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever loop has written it, and whatever verl's tags and counts of turns say."""
    result = read(Queue(reported=True, by_tool=1), monkeypatch)
    assert result.length_B.tolist() == [2, 2, 0, 1]


def test_batches_are_joined_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    one = read(Queue(reported=True), monkeypatch)
    both = Outcomes.join([one, one])
    assert both.keys == [*TOKENS, *TOKENS] and both.reward_B.tolist() == [*REWARD.values()] * 2


def test_responses_are_read_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes.tq, "kv_batch_get", Queue(reported=True).kv_batch_get)
    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(f"<{token}>" for token in tokens.tolist()))
    assert read_responses("train", tokenizer, ["b_1_0", "a_0_0"]) == ["<8> <9>", "<5> <6> <7>"]


def test_recorded_rows_get_their_prompt_id_and_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = outcome_columns(read(Queue(reported=True), monkeypatch), np.array([3, 0]))
    assert {name: values.tolist() for name, values in columns.items()} == {
        "id": ["b_1_0", "a_0_0"], "prompt": ["b", "a"], "reward": [0.5, 1.0], "data_source": ["math", "math"]
    }  # fmt: skip


def test_the_distance_to_the_start_is_k3_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses of two tokens and of one, and a row of padding; pi_ref is e^d of pi."""
    d = [torch.tensor([math.log(2.0), 0.0]), torch.tensor([-1.0]), torch.zeros(0)]
    columns = {
        "old_log_probs": [torch.full_like(row, -2.0) for row in d],
        "ref_log_prob": [row - 2.0 for row in d],
        "response_mask": [torch.ones_like(row) for row in d],
    }
    nested = {name: torch.nested.nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
    read = TensorDict(nested, batch_size=[3])
    monkeypatch.setattr(outcomes.tq, "kv_batch_get", lambda **_: read)
    distance = kl_to_start(KVBatchMeta(["a", "b", "pad"], [{}, {}, {}], "train"))
    assert distance == pytest.approx(((2 - math.log(2) - 1) / 2 + math.exp(-1)) / 2)
