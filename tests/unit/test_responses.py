"""Recorded responses in memory: mini-batches, clusters, epochs, other bands."""

from __future__ import annotations

import numpy as np

from fspo.responses import Responses


def test_rows_without_s_are_left_out_and_updates_are_mini_batches() -> None:
    rows = {
        "S": [0.1, np.nan, 0.2, 0.3, 0.4],
        "L": [3, 4, 5, 6, 7],
        "step": [1, 1, 1, 2, 2],
        "update": [0, 0, 1, 0, 1],
        "minibatch": [0, 0, 0, 0, 1],  # in step 1 the learning rate was 0
        "prompt": [7, 7, 7, 9, 9],
    }
    responses = Responses.of_rows(rows)
    assert responses.length_B.tolist() == [3, 5, 6, 7] and responses.batch_B.tolist() == [0, 1, 2, 3]
    assert responses.moved_B.tolist() == [False, False, False, True] and responses.unit == "prompt groups"
    assert responses.cluster_B.tolist() == [0, 0, 1, 1]
    moved = responses.moved()
    assert moved.length_B.tolist() == [7] and moved.batch_B.tolist() == [0] and moved.batches == 1
    assert len(responses.unmoved()) == 3 and not responses.rule_known
    assert len(Responses.of_rows(rows, every_mini_batch=True).moved()) == 4
    plain = Responses.of_rows({"S": [0.1, 0.2], "L": [1, 2]})
    assert plain.batches == 1 and plain.moved_B.all() and plain.unit == "mini-batches"


def test_mini_batches_of_seeds_and_distant_steps_stay_apart() -> None:
    rows = {"S": np.ones(6), "L": np.ones(6), "seed": [0, 0, 1, 1, 1, 1], "step": [1, 10**9, 1, 1, 2, 2]}
    responses = Responses.of_rows(rows | {"minibatch": [1, 1, 1, 2, 1, 1]})
    assert responses.batch_B.tolist() == [0, 1, 2, 3, 4, 4]


def test_responses_of_a_later_epoch_are_known_by_their_row() -> None:
    """Two epochs of two mini-batches, in another order in the second; the last step goes on."""
    rows = {
        "row": [0, 1, 2, 3, 2, 0, 3, 1, 0, 1, 0],
        "update": [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1],
        "step": [1] * 8 + [2] * 3,
    }
    columns = rows | {"S": np.ones(11), "L": np.ones(11)}
    assert Responses.of_rows(columns).again_B.tolist() == [False] * 4 + [True] * 4 + [False, False, True]
    assert not Responses.of_rows(columns | {"row": [-1] * 11}).again_B.any(), "not known"


def test_joined_sets_keep_their_mini_batches_and_prompt_groups() -> None:
    one = Responses.of_rows({"S": [0.1, 0.2], "L": [1, 2], "minibatch": [1, 2], "prompt": [0, 1]})
    both = Responses.join([one, one])
    assert both.batch_B.tolist() == both.prompt_B.tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]
    without = Responses.join([one, Responses.of_rows({"S": [0.1], "L": [1]})])
    assert without.prompt_B is None and without.batch_B.tolist() == [0, 1, 2]
    assert len(Responses.join([])) == 0 and Responses.join([]).batches == 0
