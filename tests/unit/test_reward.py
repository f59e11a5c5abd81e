"""The reward hook as verl calls it."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.math.data.offline_task import DATA_SOURCE, distinct
from recipe.math.reward import compute_score, soft_overlong_penalty


def call(source: str, text: str, truth: str, **kwargs: Any) -> dict[str, Any]:
    return compute_score(data_source=source, solution_str=text, ground_truth=truth, **kwargs)


def test_right_and_wrong_answers() -> None:
    right = call("math500", r"so \boxed{34}", "34", extra_info={"problem_id": "math500/7", "response_length": 12})
    flags = {"timeout": 0.0, "parse_failed": 0.0, "crashed": 0.0}
    facts = {"response_length": 12, "status": "correct", "data_source": "math500", "problem_id": "math500/7"}
    assert right == {"score": 1.0, "acc": 1.0, **flags, **facts}
    wrong = call("math500", r"so \boxed{35}", "34")
    assert (wrong["acc"], wrong["status"]) == (0.0, "wrong")


def test_the_offline_task_has_its_own_verifier_and_the_same_keys() -> None:
    """verl reads the keys of the first row; of files that it joins, a field that one lacks is None in its rows."""
    (problem,) = distinct(1, 0, "train")
    result = call(DATA_SOURCE, problem.working, problem.answer, extra_info={"index": 3, "problem_id": None})
    assert (result["score"], result["status"], result["problem_id"]) == (1.0, "correct", f"{DATA_SOURCE}/3")
    assert call(DATA_SOURCE, "", problem.answer)["score"] == 0.0
    assert list(result) == list(call("aime24", r"\boxed{1}", "1"))


def test_shaping_changes_the_score_but_not_the_accuracy() -> None:
    shaping = {"overlong_buffer": 20, "max_response_length": 100}
    shaped = call("aime24", r"\boxed{1}", "1", extra_info={"response_length": 95}, **shaping)
    assert (shaped["acc"], shaped["score"]) == (1.0, pytest.approx(1.0 - 0.75))
    with pytest.raises(ValueError, match=r"reward_manager"):
        call("aime24", r"\boxed{1}", "1", **shaping)


def test_the_overlong_penalty_is_the_published_one() -> None:
    assert [soft_overlong_penalty(n, 100, 20) for n in (0, 80, 90, 100, 1000)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert soft_overlong_penalty(50, 100, 100) == -0.5
    for buffer in (-1, 0, 101):
        with pytest.raises(ValueError, match=rf"{buffer}\b.*100"):
            soft_overlong_penalty(10, 100, buffer)
