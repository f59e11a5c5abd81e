"""Which responses are kept for reading, and that whatever a reward reports can be written."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fspo.samples import is_right, quarters, spread, validation_samples


def test_rare_values_are_shown() -> None:
    n = 1000
    length = quarters(np.arange(n))
    right = np.arange(n) % 100 == 0  # ten of a thousand, in all quarters
    clipped = np.arange(n) == 500  # one, which is right too
    for seed in range(20):
        chosen = spread([length, right, clipped], 8, seed)
        assert len(set(chosen)) == 8
        assert np.bincount(length[chosen], minlength=4).min() >= 1
        assert 3 <= right[chosen].sum() <= 5
        assert clipped[chosen].any()
    assert spread([length, right], 8, 1) == spread([length, right], 8, 1) != spread([length, right], 8, 2)
    assert sorted(spread([[1, 1, 2]], 5, 0)) == [0, 1, 2], "no more than there are"
    assert spread([[]], 5, 0) == []


def test_equal_lengths_are_in_one_quarter() -> None:
    assert len(set(quarters([7] * 9))) == 1
    assert quarters([1, 2, 3, 4, 5, 6, 7, 8]).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert quarters([]).tolist() == []


@pytest.mark.parametrize(
    ("info", "reward", "right"),
    [({"acc": 1.0}, -1.0, True), ({"acc": 0}, 2.0, False), ({}, 0.5, True), ({"acc": None}, 0.0, False),
     ({"acc": "yes"}, 1.0, True), ({"acc": np.float32(1)}, 0.0, True), ({}, None, False), ({}, float("nan"), False)],
)  # fmt: skip
def test_right_is_what_acc_says_or_else_the_reward(info: dict[str, object], reward: object, right: bool) -> None:
    assert is_right(info, reward) is right


def test_whatever_a_reward_reports_can_be_written() -> None:
    texts = (
        [f"prompt {i // 2}" for i in range(6)],
        [f"<{i}>" for i in range(6)],
        [0.0, 1.0, float("nan"), 0.5, 0.0, 2.0],
    )
    infos = {
        "acc": [np.float32(0), np.bool_(True), None, 0.1234567891, "?", 1],
        "status": [1, None, ("a", 2), "wrong", "ok", None],
        "response_length": [np.int64(3), None, "many", 4, 5.0, 6],
        "short": [1],
    }
    lines = [json.loads(json.dumps(line, allow_nan=False)) for line in validation_samples(texts, infos, 8, 1, 20)]
    assert [line["sample"] for line in lines] == list(range(6))
    by_response = {line["response"]: line for line in lines}
    assert by_response["<0>"] == {
        "step": 20, "kind": "validation", "sample": by_response["<0>"]["sample"], "prompt": "prompt 0",
        "response": "<0>", "reward": 0.0, "L": 3, "acc": 0.0, "status": 1,
    }  # fmt: skip
    assert by_response["<2>"]["reward"] is None and by_response["<2>"]["L"] is None
    assert by_response["<3>"]["acc"] == 0.1234568
    assert len({line["prompt"] for line in lines[:3]}) == 3, "each prompt before any again"
    assert list(validation_samples(([], [], []), {}, 8, 1, 0)) == []
