"""A reward is tried on rows of the data: for a time, and without a word of its settings."""

from __future__ import annotations

import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from recipe.runner.launch import reward_trial
from recipe.runner.launch.own_process import asked
from recipe.runner.launch.reward_trial import TrialRow, tried


def rows(*sources: str) -> list[TrialRow]:
    return [TrialRow(f"row {i} of x", source, str(i), {}) for i, source in enumerate(sources)]


def test_the_end_of_the_time_is_a_note_with_the_rows_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_trial, "LIMIT_S", 0.3)

    def slow(**_: Any) -> float:
        time.sleep(0.12)
        return 0.0

    outcome = tried(slow, {}, rows(*["own"] * 9))
    assert outcome.failure == "" and "0 of 9 rows" in "".join(outcome.notes)  # six calls a row
    monkeypatch.setattr(reward_trial, "CALL_LIMIT_S", 0.05)
    assert "row 0 of x" in tried(slow, {}, rows("own")).failure


def test_a_reward_that_answers_its_failure_in_a_thread_with_a_number_is_named() -> None:
    """math-verify raises in any thread but the main one, and many rewards return 0 for whatever it raises."""

    def reward(solution_str: str, ground_truth: str, **_: Any) -> float:
        try:
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
            return float(solution_str == f"Answer: {ground_truth}")
        except ValueError:
            return 0.0

    failure = tried(reward, {}, rows("own")).failure
    assert "row 0 of x" in failure and "'Answer: 0'" in failure and "signal.alarm" in failure

    def wants_another_form(solution_str: str, **_: Any) -> dict[str, float]:
        return {"score": float(solution_str == "something else")}

    outcome = tried(wants_another_form, {}, rows("own"))
    assert outcome.failure == "" and "data_source=own" in "".join(outcome.notes)


def test_a_source_that_a_reward_does_not_know_is_the_first_of_its_failures() -> None:
    def reward(data_source: str, **_: Any) -> float:
        if data_source == "unknown":
            raise NotImplementedError
        raise KeyError(data_source)

    outcome = tried(reward, {}, rows("own", "own", "unknown"))
    assert outcome.is_unknown and "row 2 of x" in outcome.failure
    outcome = tried(reward, {}, rows("own", "other"))
    assert not outcome.is_unknown and "row 0 of x" in outcome.failure


def test_a_module_of_the_users_is_run_once_in_its_process(tmp_path: Path) -> None:
    """It may register a tool, which verl refuses to do twice."""
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\ndef compute_score(*_, **__): return 1.0\n")
    given = pickle.dumps(({}, [TrialRow("row 0", "math", "3", {})]))
    answer, problem = asked("recipe.runner.launch.reward_trial", str(file), "compute_score", given=given)
    assert problem is None and not answer[0]
    assert (tmp_path / "runs").read_text() == "x"
