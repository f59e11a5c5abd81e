"""Responses in memory: sums by length against plain numpy, mini-batches and clusters, the normal model, length bins."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from batches import loss_output, responses_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fspo.fairness.lre import length_reweighting_error
from fspo.length_bins import FINE_BINS, FINE_LENGTH_EDGES, length_bin
from fspo.losses import ALGORITHMS
from fspo.responses import VIEWS, Responses

FAST = settings(max_examples=25)


def test_length_edges_give_short_lengths_a_bin_each_and_grow_by_an_eighth_of_an_octave() -> None:
    edges = FINE_LENGTH_EDGES.tolist()
    assert edges[:17] == list(range(1, 18)) and len(edges) == FINE_BINS + 1
    assert edges[-2] == 2**17
    assert all(a < b for a, b in itertools.pairwise(edges))
    ratios = [b / a for a, b in itertools.pairwise(edges[16:-1])]
    assert max(ratios) < 1.13 and math.isclose(ratios[-1], 2 ** (1 / 8), rel_tol=1e-3)


@FAST
@given(st.integers(1, 2**20))
def test_length_bin_brackets_the_length(length: int) -> None:
    k = int(length_bin([length])[0])
    assert FINE_LENGTH_EDGES[k] <= length < FINE_LENGTH_EDGES[k + 1]


def test_columns_are_those_of_the_loss_without_padding() -> None:
    output = loss_output(200)
    responses, valid = Responses.of_output(output), output.valid_B.numpy()
    assert 0 < len(responses) == valid.sum() < 200
    removed = (output.clipped_high_B | output.clipped_low_B).numpy()[valid]
    for column, expected in (
        (responses.s_B, output.log_ratio_B),
        (responses.length_B, output.length_B),
        (responses.advantage_B, output.advantage_B),
        (responses.inside_B, output.accepted_B),
        (responses.weight_B, output.weight_B),
    ):
        np.testing.assert_array_equal(column, expected.double().numpy()[valid])
    np.testing.assert_array_equal(responses.kept_B, ~removed)
    assert removed.any() and responses.rule_known and np.isnan(responses.truncated_B).all()


def test_views_count_what_is_outside_and_what_is_removed() -> None:
    responses = responses_of(loss_output(200), loss_output(200, seed=1))
    starts = responses.starts(4)
    for view in VIEWS:
        accepted_MJ, total_MJ = responses.counts(view, starts)
        assert accepted_MJ.shape == (2, len(starts))
        for batch, j in itertools.product(range(2), range(len(starts))):
            low = FINE_LENGTH_EDGES[starts[j]]
            high = FINE_LENGTH_EDGES[starts[j + 1]] if j + 1 < len(starts) else np.inf
            members = (responses.batch_B == batch) & (responses.length_B >= low) & (responses.length_B < high)
            values = responses.inside_B if view == "symmetric" else responses.kept_B
            assert (accepted_MJ[batch, j], total_MJ[batch, j]) == (values[members].sum(), members.sum())
        expected = length_reweighting_error(accepted_MJ, total_MJ, resamples=50)
        assert responses.error(view, starts, 50).debiased == expected.debiased


@FAST
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_results_do_not_depend_on_the_order_of_the_rows(seed: int, batches: int) -> None:
    responses = responses_of(*(loss_output(40, seed=seed + i, shortest=1) for i in range(batches)))
    order = np.random.default_rng(seed).permutation(len(responses))
    columns = {name: getattr(responses, name) for name in responses.__dataclass_fields__}
    shuffled = Responses(**{name: value if value is None else value[order] for name, value in columns.items()})
    for view in VIEWS:
        np.testing.assert_array_equal(
            shuffled.counts(view, responses.starts())[0], responses.counts(view, responses.starts())[0]
        )
    assert shuffled.sigma() == pytest.approx(responses.sigma(), rel=1e-12)


def epochs_of(mini_batches: int, epochs: int, lengths: int = 1000, steps: int = 4) -> dict[str, np.ndarray]:
    """Columns of a few steps with so many epochs over 64 responses, each epoch in an order of its own."""
    rng, parts = np.random.default_rng(1), []
    for step in range(steps):
        response = {"L": rng.integers(1, lengths + 1, 64), "A": rng.integers(0, 2, 64) - 0.5}
        for epoch in range(epochs):
            order = rng.permutation(64)
            update = epoch * mini_batches + np.arange(64) * mini_batches // 64
            parts.append({"step": np.full(64, step), "update": update} | {k: v[order] for k, v in response.items()})
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return rows | {"S": rng.normal(size=len(rows["L"])), "minibatch": rows["update"]}


@pytest.mark.parametrize(("mini_batches", "epochs"), [(1, 2), (1, 3), (2, 2), (4, 1), (3, 2), (1, 1)])
def test_responses_of_a_later_epoch_are_known_by_l_and_a(mini_batches: int, epochs: int) -> None:
    rows = epochs_of(mini_batches, epochs)
    np.testing.assert_array_equal(Responses.of_rows(rows).again_B, rows["update"] >= mini_batches)
    begun = (rows["step"] < 3) | (rows["update"] == 0)  # the last step is still going on
    begun[0] = False  # a row is missing
    changed = {name: values[begun] for name, values in rows.items()}
    changed["S"][1] = np.nan
    later = changed["update"][np.isfinite(changed["S"])] >= mini_batches
    np.testing.assert_array_equal(Responses.of_rows(changed).again_B, later)
    counted_on = rows | {"update": rows["update"] + 7 * rows["step"]}
    np.testing.assert_array_equal(Responses.of_rows(counted_on).again_B, rows["update"] >= mini_batches)


def test_mini_batches_that_are_equal_by_chance_are_no_epochs() -> None:
    assert not Responses.of_rows(epochs_of(1, 2, lengths=4)).again_B.any()


def test_rows_without_s_are_left_out_and_a_mini_batch_is_a_step_and_update() -> None:
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
    plain = Responses.of_rows({"S": [0.1, 0.2], "L": [1, 2]})
    assert plain.batches == 1 and plain.moved_B.all() and plain.unit == "mini-batches"


def test_joined_sets_keep_their_mini_batches_and_prompt_groups() -> None:
    one = Responses.of_rows({"S": [0.1, 0.2], "L": [1, 2], "minibatch": [1, 2], "prompt": [0, 1]})
    both = Responses.join([one, one])
    assert both.batch_B.tolist() == both.prompt_B.tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]
    without = Responses.join([one, Responses.of_rows({"S": [0.1], "L": [1]})])
    assert without.prompt_B is None and without.batch_B.tolist() == [0, 1, 2]
    assert len(Responses.join([])) == 0 and Responses.join([]).batches == 0


def test_many_clusters_are_joined_with_their_neighbours() -> None:
    n = 5000
    responses = Responses.of_rows({"S": np.ones(n), "L": np.ones(n), "minibatch": np.arange(1, n + 1)})
    assert responses.unit == "groups of neighbouring mini-batches"
    assert np.bincount(responses.cluster_B).tolist() == [n // 100] * 100


@pytest.mark.parametrize("name", ["fspo", "seq_rloo", "seq_gspo"])
def test_another_band_judges_the_same_responses_as_its_loss_does(name: str) -> None:
    theirs, own = Responses.of_output(loss_output(200, algo=name)), Responses.of_output(loss_output(200))
    judged = own.judged_by(ALGORITHMS[name])
    for column in ("inside_B", "kept_B", "weight_B"):
        np.testing.assert_allclose(getattr(judged, column), getattr(theirs, column), rtol=1e-12)
    assert (judged.inside_B != own.inside_B).any() or name == "fspo"


def test_a_checkpoint_restores_every_column() -> None:
    responses = responses_of(loss_output(20), truncated=30)
    again = Responses.from_state_dict(responses.state_dict())
    for name in responses.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(responses, name))


def test_nothing_can_be_clipped_where_all_s_or_all_advantages_are_0() -> None:
    assert Responses.of_output(loss_output(50)).could_clip()
    assert not Responses.of_output(loss_output(50, scale=0.0)).could_clip()
    assert not Responses.of_rows({"S": [0.1], "L": [1], "A": [0.0]}).could_clip()


def test_sigma_is_the_deviation_about_the_drift() -> None:
    torch.manual_seed(0)
    output = loss_output(300, scale=0.03)
    responses = Responses.of_output(output)
    s, length = responses.s_B, responses.length_B
    mu = s.sum() / length.sum()
    assert responses.sigma() == pytest.approx(float(((s - mu * length) / np.sqrt(length)).std()))
    assert math.isnan(Responses.join([]).sigma())
