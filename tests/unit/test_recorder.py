"""What a worker keeps of its losses until the trainer asks for it."""

from __future__ import annotations

import pytest
import torch

from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import BandState, SequenceLossOutput
from recipe.fspo.recorder import Recorder, join_ranks, sequence_record


def micro_batch(seed: int) -> SequenceLossOutput:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 8, generator=generator)
    new = old + 0.1 * torch.randn(4, 8, generator=generator)
    mask = torch.arange(8) < torch.tensor([8, 5, 2, 0])[:, None]
    return sequence_policy_loss(new, old, torch.ones(4, 8), mask, ALGORITHMS["fspo"])


def test_recorder_separates_mini_batches_and_joins_micro_batches() -> None:
    recorder = Recorder()
    recorder.begin_mini_batch()
    recorder.add(micro_batch(0))
    assert recorder.pop() == []  # plain verl never enables it
    recorder.enable(max_response_length=8)
    for mini_batch in ([0, 1], [2]):
        recorder.begin_mini_batch()
        for seed in mini_batch:
            recorder.add(micro_batch(seed))
    first, second = (mini_batch.sums for mini_batch in recorder.pop())
    assert (first.total("count"), second.total("count")) == (6, 3)
    assert (first.total("truncated"), second.total("truncated")) == (2, 1)
    assert recorder.pop() == []


def test_band_state_follows_the_mini_batch() -> None:
    recorder = Recorder()
    recorder.enable(max_response_length=8)
    recorder.begin_update(BandState(drift_by_mini_batch=(0.0, 0.5)), ())
    for expected in (0.0, 0.5, 0.5):
        recorder.begin_mini_batch()
        state = recorder.current_band_state()
        assert state is not None and state.drift_per_token == expected


def test_ranks_are_joined_by_mini_batch() -> None:
    per_rank = []
    for rank in range(2):
        recorder = Recorder()
        recorder.enable(max_response_length=8, sequences=True)
        for mini_batch in range(2):
            recorder.begin_mini_batch()
            recorder.add(micro_batch(2 * rank + mini_batch))
            recorder.end_mini_batch(grad_norm=1.5)
        per_rank.append(recorder.pop())
    first, _ = join_ranks(per_rank)
    assert first.sums.total("count") == 6
    outputs = micro_batch(0), micro_batch(2)
    assert first.sums.total("S") == pytest.approx(sum(float(output.log_ratio_B.sum()) for output in outputs))
    assert first.grad_norm == 1.5
    row = sequence_record(3, 0, first)
    assert (row["step"], row["minibatch"], len(row["S"])) == (3, 0, 6)
    assert row["L"] == [8, 5, 2] * 2
    with pytest.raises(ValueError, match="shorter"):
        join_ranks([per_rank[0], per_rank[1][:1]])
