"""Sums of fspo.sums against one pass over the whole batch, under any split."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from batches import loss_output
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import holds

from fspo.records import from_record, to_record
from fspo.sums import (
    FIELDS,
    FINE_LENGTH_EDGES,
    RATIO_LOG_CAP,
    Z_EDGES,
    ZERO_CELL,
    SequenceSums,
    length_bin,
    z_cell,
)
from fspo.types import SequenceLossOutput

FAST = settings(max_examples=25)


def rows(output: SequenceLossOutput, index: torch.Tensor) -> SequenceLossOutput:
    return SequenceLossOutput(**{f.name: getattr(output, f.name)[index] for f in dataclasses.fields(output)})


def test_length_edges_give_short_lengths_a_bin_each_and_grow_by_an_eighth_of_an_octave() -> None:
    edges = FINE_LENGTH_EDGES.tolist()
    assert edges[:17] == list(range(1, 18))
    assert edges[-2] == 2**17
    assert all(a < b for a, b in itertools.pairwise(edges))
    ratios = [b / a for a, b in itertools.pairwise(edges[16:-1])]
    assert max(ratios) < 1.13 and math.isclose(ratios[-1], 2 ** (1 / 8), rel_tol=1e-3)


@FAST
@given(st.integers(1, 2**20))
def test_length_bin_brackets_the_length(length: int) -> None:
    k = int(length_bin(torch.tensor([length]))[0])
    assert FINE_LENGTH_EDGES[k] <= length < FINE_LENGTH_EDGES[k + 1]


@FAST
@given(st.floats(-1e4, 1e4))
def test_z_cell_brackets_the_value_and_is_symmetric(z: float) -> None:
    h = int(z_cell(torch.tensor([z], dtype=torch.float64))[0])
    low, high = float(Z_EDGES[h]), float(Z_EDGES[h + 1])
    assert low <= z <= high
    assert int(z_cell(torch.tensor([-z], dtype=torch.float64))[0]) == 2 * ZERO_CELL - h


def test_a_z_on_an_edge_lies_in_the_cell_farther_from_zero_and_zero_in_its_own() -> None:
    positive = torch.arange(ZERO_CELL + 2, Z_EDGES.numel() - 1)
    assert torch.equal(z_cell(Z_EDGES[positive]), positive)
    assert torch.equal(z_cell(-Z_EDGES[positive]), 2 * ZERO_CELL - positive)
    cells = z_cell(torch.tensor([0.0, -0.0, 1e-12, -1e-12], dtype=torch.float64)).tolist()
    assert cells == [ZERO_CELL, ZERO_CELL, ZERO_CELL + 1, ZERO_CELL - 1]


@FAST
@given(st.integers(0, 40), st.integers(0, 10_000), st.integers(1, 7), st.integers(1, 3))
def test_sums_do_not_depend_on_micro_batches_or_ranks(batch: int, seed: int, micro: int, ranks: int) -> None:
    output = loss_output(batch, seed=seed)
    truncated_B = output.length_B >= 60
    whole = SequenceSums.zeros().add_(output, truncated_B)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed + 1))
    parts = []
    for rank in range(ranks):
        part = SequenceSums.zeros()
        for chunk in order[rank::ranks].split(micro):
            part.add_(rows(output, chunk), truncated_B[chunk])
        parts.append(part)
    split = sum(parts, SequenceSums.zeros())
    torch.testing.assert_close(split.sums_KF, whole.sums_KF, rtol=1e-12, atol=1e-12)
    exact = slice(FIELDS.index("length") + 1)  # counts and lengths, which come before the real numbers
    assert torch.equal(split.sums_KF[:, exact], whole.sums_KF[:, exact]) and torch.equal(split.hist_KH, whole.hist_KH)


@pytest.mark.parametrize("algo", ["fspo", "seq_rloo", "seq_gspo"])
def test_sums_equal_plain_numpy_over_the_batch(algo: str) -> None:
    output = loss_output(200, algo=algo)
    sums = SequenceSums.zeros().add_(output)
    v = output.valid_B.numpy()
    s, length, a = output.log_ratio_B.numpy()[v], output.length_B.numpy()[v], output.advantage_B.numpy()[v]
    low, high, w = output.lower_B.numpy()[v], output.upper_B.numpy()[v], output.weight_B.numpy()[v]
    inside = (s >= low) & (s <= high)
    z = s / np.sqrt(length)
    expected = {
        "count": v.sum(), "accepted": inside.sum(),
        "clipped_high": ((s > high) & (a > 0)).sum(), "clipped_low": ((s < low) & (a < 0)).sum(),
        "advantage_zero": (a == 0).sum(), "advantage_zero_accepted": ((a == 0) & inside).sum(),
        "length": length.sum(), "length_sqrt": np.sqrt(length).sum(),
        "S": s.sum(), "S_squared": (s**2).sum(), "z": z.sum(), "z_squared": (z**2).sum(),
        "weight": w.sum(), "weight_squared": (w**2).sum(), "weight_accepted": w[inside].sum(),
        "ratio": np.exp(s).sum(), "ratio_squared": np.exp(2 * s).sum(), "ratio_accepted": np.exp(s)[inside].sum(),
        "truncated": 0, "truncated_accepted": 0, "overflow": 0,
    }  # fmt: skip
    assert expected.keys() == set(FIELDS)
    for name, value in expected.items():
        assert sums.total(name) == pytest.approx(float(value), rel=1e-9), name
    k = 20
    members = (length >= int(FINE_LENGTH_EDGES[k])) & (length < int(FINE_LENGTH_EDGES[k + 1]))
    assert float(sums.column("S")[k]) == pytest.approx(s[members].sum())


def test_a_runaway_sequence_keeps_the_sums_finite() -> None:
    output = loss_output(4, scale=0.0)
    output = dataclasses.replace(
        output, log_ratio_B=torch.full((4,), 500.0), weight_B=torch.full((4,), math.inf), valid_B=torch.ones(4).bool(),
        length_B=torch.ones(4).long(),
    )  # fmt: skip
    sums = SequenceSums.zeros().add_(output)
    assert sums.total("ratio") == pytest.approx(4 * math.exp(RATIO_LOG_CAP))
    assert bool(torch.isfinite(sums.sums_KF).all())


def test_checkpoint_and_record_round_trip() -> None:
    sums = SequenceSums.zeros().add_(loss_output(50))
    again = SequenceSums.from_state_dict(sums.state_dict())
    assert torch.equal(again.sums_KF, sums.sums_KF) and torch.equal(again.hist_KH, sums.hist_KH)
    with pytest.raises(ValueError, match=holds("layout", "None")):
        SequenceSums.from_state_dict({})
    with pytest.raises(ValueError, match=holds("sums_KF", "(2, 2)")):
        SequenceSums(torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.int64))
    record = json.loads(json.dumps(to_record(sums, step=7, minibatch=2)))
    assert (record["step"], record["minibatch"]) == (7, 2)
    again = from_record(record)
    torch.testing.assert_close(again.sums_KF, sums.sums_KF, rtol=1e-8, atol=1e-12)
    assert torch.equal(again.hist_KH, sums.hist_KH)


@pytest.mark.parametrize("change", [{"layout": 0}, {"rows": [[1, 2]]}, {"rows": None}, {"hist": [[0, 10_000, 1]]}])
def test_broken_records_are_refused(change: dict[str, object]) -> None:
    record = to_record(SequenceSums.zeros().add_(loss_output(5)), step=0, minibatch=1)
    with pytest.raises(ValueError, match="layout.*0" if "layout" in change else None):
        from_record(record | change)
