"""The reward hook as verl calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fspo.data.offline_task import DATA_SOURCE, generate
from recipe.fspo.reward import compute_score

ROOT = Path(__file__).resolve().parents[2]


def call(source: str, text: str, truth: str, **kwargs: Any) -> dict[str, Any]:
    return compute_score(data_source=source, solution_str=text, ground_truth=truth, **kwargs)


def test_right_and_wrong_answers() -> None:
    right = call("math500", r"so \boxed{34}", "34", extra_info={"problem_id": "math500/7", "response_length": 12})
    assert right == {
        "score": 1.0,
        "acc": 1.0,
        "acc_plain": 1.0,
        "timeout": 0.0,
        "parse_failed": 0.0,
        "crashed": 0.0,
        "response_length": 12,
        "status": "correct",
        "data_source": "math500",
        "problem_id": "math500/7",
    }
    assert call("math500", r"so \boxed{35}", "34")["acc"] == 0.0


def test_the_offline_task_has_its_own_verifier() -> None:
    (problem,), _ = generate(1, 0, seed=0)
    found = call(DATA_SOURCE, problem.working, problem.answer, extra_info={"index": 3})
    assert (found["score"], found["status"], found["problem_id"]) == (1.0, "correct", f"{DATA_SOURCE}/3")
    assert call(DATA_SOURCE, "", problem.answer)["score"] == 0.0


def test_a_row_without_a_problem_is_known_by_its_index() -> None:
    """verl joins files of one list, and a field that one of them lacks is None in its rows."""
    ids = [call("fspo/remainder", "1", "1", extra_info={"index": i, "problem_id": None})["problem_id"] for i in (0, 1)]
    assert ids == ["fspo/remainder/0", "fspo/remainder/1"]


def test_all_sources_have_the_same_keys_because_verl_reads_those_of_the_first_row() -> None:
    assert list(call("fspo/remainder", "1", "1")) == list(call("aime24", r"\boxed{1}", "1"))


def test_verl_may_pass_more_than_we_use() -> None:
    assert (
        call("aime24", r"\boxed{1}", "1", reward_router_address="host:1", reward_model_tokenizer=None)["score"] == 1.0
    )


def test_shaping_changes_the_score_but_not_the_accuracy() -> None:
    info = {"response_length": 95}
    shaped = call(
        "aime24", r"\boxed{1}", "1", extra_info=info, format_weight=0.1, overlong_buffer=20, max_response_length=100
    )
    assert shaped["acc"] == 1.0
    assert shaped["score"] == pytest.approx(1.0 + 0.1 - 0.75)


def test_overlong_penalty_without_lengths_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"reward_manager"):
        call("aime24", r"\boxed{1}", "1", overlong_buffer=20, max_response_length=100)
