"""What is said of the responses of rollout batches and validations, and of a generation's progress."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from messages import holds
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from recipe.runner.launch.end_of_turn import SETTING
from recipe.runner.progress import PROGRESS
from recipe.runner.response_watch import ResponseWatch, warn_of_missing

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lines:
    """What is said from one call to the next."""
    monkeypatch.setattr(PROGRESS, "_file", None)  # put back afterwards
    PROGRESS.write_to(tmp_path)
    file = tmp_path / "progress.log"
    file.touch()
    before = 0

    def new() -> list[str]:
        nonlocal before
        text = file.read_text()
        start, before = before, len(text)
        return text[start:].splitlines()

    return new


def test_one_warning_each_where_most_responses_of_a_validation_or_a_rollout_batch_are_cut(lines: Lines) -> None:
    batches: list[tuple[str, list[int]]] = []

    def sample(**_: object) -> tuple[SimpleNamespace, dict[str, float]]:
        partition, lengths = batches.pop(0)
        tags = [{"response_len": length} for length in lengths]
        return SimpleNamespace(partition_id=partition, tags=tags), {"x": 1.0}

    buffer = SimpleNamespace(_wait_for_next_poll=None, sample=sample)
    watch = ResponseWatch(64, at_poll=lambda _: None)
    watch.watch(buffer)

    def printed(partition: str, *parts: list[int]) -> list[str]:
        batches.extend((partition, part) for part in parts)
        for part in parts:
            batch, metrics = buffer.sample(partition_id=partition)
            assert len(batch.tags) == len(part) and metrics == {"x": 1.0}
        watch.end(partition, 3)
        return lines()

    assert printed("train", [64, 64, 63, 1]) == []  # half of them
    assert printed("train", []) == printed("val", []) == []
    assert printed("train", [1, 2, 3], [64, 64]) == [], "of a step as a whole, whose shortest responses come first"
    (line,) = printed("train", [64, 64, 64, 1])
    assert re.search(
        holds("warning: 75% ", "rollout batch of step 3 ", "data.max_response_length=64", f"++{SETTING}="), line
    )
    assert printed("train", [64, 64]) == [] and printed("val", [64, 1], [1, 64]) == []
    (line,) = printed("val", [64, 1], [64, 70, 2])  # of a validation as a whole, in several batches
    assert "warning: 60% " in line and "the validation after step 3 " in line
    assert printed("val", [64]) == []


def test_missing_responses_are_counted_and_their_reason_is_where_it_says(lines: Lines) -> None:
    warn_of_missing(0, 64, "step 4", "trains without them")
    warn_of_missing(3, 64, "step 4", "trains without them")
    (line,) = lines()
    assert re.search(holds("step 4 ", "61 of 64 ", " 3 ", "AgentLoopWorker"), line)


def test_a_buffer_of_ones_own_tells_its_progress() -> None:
    polls: list[str] = []

    class Mine(ReplayBufferAsync):  # type: ignore[misc]
        """As ``trainer.v1.sampler.custom_sampler`` names one: verl asks for a subclass of its own."""

    mine = Mine("separate_async", {}, max_off_policy_threshold=2, max_off_policy_strategy="drop", sampler_kwargs={})
    ResponseWatch(64, polls.append).watch(mine)
    mine.poll_interval = 0.0
    mine._wait_for_next_poll("train", 0.0)
    assert polls == ["0 responses finished; prompts: 0 pending, 0 running, 0 finished, 0 failed"]
