"""What a worker keeps of its losses until the trainer asks for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fspo.audit import minibatch_numbers
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import BandState, SequenceLossOutput
from recipe.fspo.recorder import MiniBatch, Recorder, end_of_response, join_ranks

Added = tuple[str, tuple[torch.Tensor, ...], SequenceLossOutput]


def micro_batch(seed: int) -> Added:
    """What a loss adds to the recorder: its name, its tensors, its output."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 8, generator=generator)
    new = old + 0.1 * torch.randn(4, 8, generator=generator)
    mask = torch.arange(8) < torch.tensor([8, 5, 2, 0])[:, None]
    tensors = (new, old, torch.ones(4, 8), mask)
    return "fspo", tensors, sequence_policy_loss(*tensors, ALGORITHMS["fspo"])


def recorded(*mini_batches: list[int], grad_norm: float | None = None) -> list[MiniBatch]:
    """What a rank has recorded of micro-batches with these seeds."""
    recorder = Recorder()
    recorder.enable(max_response_length=8)
    recorder.begin_update(None, step=1)
    for seeds in mini_batches:
        recorder.begin_mini_batch()
        for seed in seeds:
            recorder.add(*micro_batch(seed))
        recorder.end_mini_batch(grad_norm)
    popped = recorder.pop()
    assert recorder.pop() == []
    return popped


def test_recorder_separates_mini_batches_and_joins_micro_batches() -> None:
    first, second = (mini_batch.rows for mini_batch in recorded([0, 1], [2]))
    assert (len(first["S"]), len(second["S"])) == (6, 3)
    assert (first["truncated"].sum(), second["truncated"].sum()) == (2, 1)
    assert first["update"].tolist() == [0] * 6 and second["update"].tolist() == [1] * 3
    assert first["step"].tolist() == [1] * 6 and second["minibatch"].tolist() == [1] * 3
    recorder = Recorder()
    recorder.begin_mini_batch()
    recorder.add(*micro_batch(0))
    assert recorder.pop() == []  # plain verl never enables it


def test_band_state_follows_the_mini_batch() -> None:
    recorder = Recorder()
    recorder.enable(max_response_length=8)
    recorder.begin_update(BandState(drift_by_mini_batch=(0.0, 0.5)), step=1)
    for expected in (0.0, 0.5, 0.5):
        recorder.begin_mini_batch()
        state = recorder.current_band_state()
        assert state is not None and state.drift_per_token == expected
        recorder.end_mini_batch(grad_norm=None)
    for step, expected in ((2, 0.0), (2, 0.5), (3, 0.0)):  # an update for each mini-batch, as separate_async has
        recorder.begin_update(BandState(drift_by_mini_batch=(0.0, 0.5)), step)
        recorder.begin_mini_batch()
        state = recorder.current_band_state()
        assert state is not None and state.drift_per_token == expected
        recorder.end_mini_batch(grad_norm=None)
        recorder.pop()


def test_ranks_are_joined_by_mini_batch() -> None:
    per_rank = [recorded([2 * rank], [2 * rank + 1], grad_norm=1.5) for rank in range(2)]
    first, _ = join_ranks([*per_rank, None])  # under Ulysses another rank speaks for the last one
    outputs = micro_batch(0)[-1], micro_batch(2)[-1]
    expected = torch.cat([output.log_ratio_B[:3] for output in outputs])
    np.testing.assert_allclose(first.rows["S"], expected, rtol=1e-6)
    assert first.grad_norm == 1.5 and first.number == 0
    assert first.rows["L"].tolist() == [8, 5, 2] * 2
    with pytest.raises(ValueError):
        join_ranks([per_rank[0], per_rank[1][:1]])


@pytest.mark.parametrize("ranks", [[[7, 2, 5], [0, 6, 1, 3, 4]], [[0], [], [7, 6, 5, 4], [3, 2, 1]]])
def test_the_rows_are_the_same_bit_for_bit_on_any_ranks(ranks: list[list[int]]) -> None:
    joined = []
    for seeds_of_ranks in ([list(range(8))], ranks):
        per_rank = []
        for seeds in seeds_of_ranks:
            recorder = Recorder()
            recorder.enable(max_response_length=8)
            recorder.begin_update(None, step=1)
            recorder.begin_mini_batch()
            for seed in seeds:
                recorder.begin_micro_batch(4 * seed + torch.tensor([2, 0, 1, 3]))
                recorder.add(*micro_batch(seed))
            recorder.end_mini_batch(grad_norm=None)
            per_rank.append(recorder.pop())
        joined.append(join_ranks(per_rank)[0].rows)
    one, several = joined
    assert set(one) == set(several) and len(one["S"]) == 24
    for name, values in one.items():
        np.testing.assert_array_equal(values, several[name], strict=True)


def test_what_a_tool_has_written_counts_for_the_budget_only() -> None:
    # Two turns of the model around an answer of a tool; one turn; nothing of the model's (verl's padding).
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [0] * 8])
    difference = torch.where(mask.bool(), 0.01, torch.inf)  # whatever stands in the tool's places
    old = torch.zeros(3, 8)
    new = (old + difference).requires_grad_()
    output = sequence_policy_loss(new, old, torch.ones(3, 8), mask, ALGORITHMS["fspo"])
    output.loss_B.sum().backward()
    assert output.length_B.tolist() == [6, 5, 0]
    assert output.log_ratio_B.tolist() == pytest.approx([0.06, 0.05, 0])
    assert output.upper_B[:2].tolist() == pytest.approx([0.03 * 6**0.5, 0.03 * 5**0.5])
    assert new.grad is not None and torch.equal(new.grad != 0, mask.bool())
    assert end_of_response(mask).tolist() == [8, 5, 0]
    recorder = Recorder()
    recorder.enable(max_response_length=8)
    recorder.begin_update(None, step=1)
    recorder.begin_mini_batch()
    recorder.add("fspo", (new, old, torch.ones(3, 8), mask), output)
    recorder.end_mini_batch(grad_norm=None)
    (mini_batch,) = recorder.pop()
    assert mini_batch.rows["L"].tolist() == [6, 5] and mini_batch.rows["truncated"].tolist() == [1, 0]


def test_recorded_sequences_find_their_rows_under_any_split() -> None:
    ranks = []
    for rank in range(2):
        recorder = Recorder()
        recorder.enable(max_response_length=8)
        recorder.begin_update(None, step=1)
        for mini_batch in range(4):  # two mini-batches, two epochs
            recorder.begin_mini_batch()
            first = 8 * (mini_batch % 2) + 4 * rank
            recorder.begin_micro_batch(torch.tensor([first + i for i in (2, 0, 1, 3)]))
            recorder.add(*micro_batch(seed=4 * mini_batch + rank))
            recorder.end_mini_batch(grad_norm=None)
        ranks.append(recorder.pop())
    rows = join_ranks(ranks)[0].rows
    assert rows["row"].tolist() == [0, 1, 2, 4, 5, 6], "the fourth row of each micro-batch is padding"
    order = [1, 2, 0]
    for name, of_output in (("S", lambda output: output.log_ratio_B), ("inside", lambda output: output.accepted_B)):
        outputs = [of_output(micro_batch(seed=rank)[-1])[:3][order] for rank in range(2)]
        assert rows[name].tolist() == pytest.approx(torch.cat(outputs).float().tolist())
    assert 0 < rows["inside"].sum() < 6


@pytest.mark.parametrize(
    ("steps", "unmoved"),
    [
        ([(1e-6, 1.0), (1e-6, 1.0), (1e-6, 1.0)], 1),
        ([(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)], 3),  # a warm-up begins with a learning rate of 0
        ([(1e-6, math.inf), (1e-6, 1.0), (1e-6, 1.0)], 2),  # a step that the gradient scaler skipped
        ([(None, None)], 1),
    ],
)
def test_mini_batches_before_the_first_step_that_moves_are_unmoved(
    steps: list[tuple[float | None, float | None]], unmoved: int
) -> None:
    recorder = Recorder()
    recorder.enable(max_response_length=8)
    for step in (1, 2):  # each rollout batch is counted anew
        for learning_rate, grad_norm in steps:
            recorder.begin_update(None, step)
            recorder.begin_mini_batch()
            recorder.end_mini_batch(grad_norm, learning_rate)
        assert [part.number for part in recorder.pop()] == [0] * unmoved + list(range(unmoved, len(steps)))
    assert minibatch_numbers([False, True, True]) == [0, 0, 2]
