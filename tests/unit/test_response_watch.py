"""What is said of the responses of rollout batches and validations, and of a generation's progress."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import holds
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from recipe.runner.launch.end_of_turn import SETTING
from recipe.runner.progress import PROGRESS
from recipe.runner.response_watch import tell_polls, warn_of_cut, warn_of_missing

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


def test_that_most_responses_of_a_step_are_cut_is_said_with_the_remedy(lines: Lines) -> None:
    assert not warn_of_cut([64, 64, 63, 1], 64, 3) and not warn_of_cut([], 64, 3) and lines() == [], "half of them"
    assert warn_of_cut([64, 64, 70, 1], 64, 3)
    (line,) = lines()
    assert re.search(
        holds("warning: 75% ", "rollout batch of step 3 ", "data.max_response_length=64", f"++{SETTING}="), line
    )


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
    tell_polls(mine, polls.append)
    mine.poll_interval = 0.0
    mine._wait_for_next_poll("train", 0.0)
    assert polls == ["0 responses finished; prompts: 0 pending, 0 running, 0 finished, 0 failed"]
