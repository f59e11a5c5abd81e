"""What the trainer reads of a step's responses: masks and one value each, and the same as from their tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_in_memory import Queue
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from fspo.metrics import LengthDiagnostics
from recipe.fspo import rollout_batch
from recipe.fspo.rollout_batch import kl_to_start, lengths_and_ends, outcome_metrics, read_outcomes

#: Tokens of each response, and its reward.
RESPONSES = {"a_0_0": (3, 1.0), "a_1_0": (3, 1.0), "b_0_0": (1, 0.0), "b_1_0": (2, 0.5)}


def test_responses_have_means_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task is known here: shares are of whatever statuses a reward reports."""
    queue = Queue()
    monkeypatch.setattr(rollout_batch, "tq", queue)
    for key, (length, reward) in RESPONSES.items():
        info = {"acc": float(reward == 1), "status": "correct" if reward else None}
        scores = torch.tensor([0.0] * (length - 1) + [reward])
        row = {"response_mask": torch.ones(length, dtype=torch.int64), "rm_scores": scores, "data_source": "math"}
        queue.rows[key] = row | {"extra_fields": {"raw_prompt": "?", "reward_extra_info": info}}
    outcomes = read_outcomes(KVBatchMeta([*RESPONSES], [{}] * len(RESPONSES), "train"))
    metrics = outcome_metrics(outcomes, LengthDiagnostics(window=1))
    assert metrics["fspo/length_trained"] == 9 / 4
    assert {key: value for key, value in metrics.items() if key.startswith("reward/")} == {"reward/status/correct": 1.0}


masks = st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=9)


@settings(max_examples=100)
@given(masks)
def test_lengths_count_the_models_tokens(rows: list[list[int]]) -> None:
    nested = torch.nested.nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)
    length_B, end_B = lengths_and_ends(nested)
    assert length_B.dtype == torch.int64
    assert length_B.tolist() == [sum(row) for row in rows]
    assert end_B.tolist() == [max((place for place, own in enumerate(row, 1) if own), default=0) for row in rows]


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
    monkeypatch.setattr(rollout_batch.tq, "kv_batch_get", lambda **_: read)
    distance = kl_to_start(KVBatchMeta(["a", "b", "pad"], [{}, {}, {}], "train"))
    assert distance == pytest.approx(((2 - math.log(2) - 1) / 2 + math.exp(-1)) / 2)
