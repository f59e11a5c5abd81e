"""The reward hook as verl calls it."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.math.data.offline_task import DATA_SOURCE, generate
from recipe.math.reward import compute_score, settings_problem


def call(source: str, text: str, truth: str, **kwargs: Any) -> dict[str, Any]:
    return compute_score(data_source=source, solution_str=text, ground_truth=truth, **kwargs)


def test_right_and_wrong_answers() -> None:
    right = call("math500", r"so \boxed{34}", "34", extra_info={"problem_id": "math500/7", "response_length": 12})
    assert right == {
        "score": 1.0,
        "acc": 1.0,
        "timeout": 0.0,
        "parse_failed": 0.0,
        "crashed": 0.0,
        "response_length": 12,
        "status": "correct",
        "data_source": "math500",
        "problem_id": "math500/7",
    }
    assert call("math500", r"so \boxed{35}", "34")["acc"] == 0.0


def test_the_offline_task_has_its_own_verifier_and_the_same_keys() -> None:
    """verl reads the keys of the first row; of files that it joins, a field that one lacks is None in its rows."""
    (problem,), _ = generate(1, 0, seed=0)
    result = call(DATA_SOURCE, problem.working, problem.answer, extra_info={"index": 3, "problem_id": None})
    assert (result["score"], result["status"], result["problem_id"]) == (1.0, "correct", f"{DATA_SOURCE}/3")
    assert call(DATA_SOURCE, "", problem.answer)["score"] == 0.0
    assert list(result) == list(call("aime24", r"\boxed{1}", "1"))


def test_shaping_changes_the_score_but_not_the_accuracy() -> None:
    info = {"response_length": 95}
    shaping = {"format_weight": 0.1, "overlong_buffer": 20, "max_response_length": 100}
    shaped = call("aime24", r"\boxed{1}", "1", extra_info=info, reward_router_address="verl's", **shaping)
    assert shaped["acc"] == 1.0
    assert shaped["score"] == pytest.approx(1.0 + 0.1 - 0.75)
    with pytest.raises(ValueError, match=r"reward_manager"):
        call("aime24", r"\boxed{1}", "1", overlong_buffer=20, max_response_length=100)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"time_limit_s": 2, "n_workers": None, "overlong_buffer": None, "normalise": False}, ()),
        ({"time_limit": 2}, ("time_limit", "did you mean time_limit_s?")),
        ({"time_limit_s": "2"}, ("time_limit_s=2", "a number")),
        ({"n_workers": 1.5}, ("n_workers=1.5", "whole number", "null")),
        ({"memory_limit_mb": True}, ("memory_limit_mb=True", "whole number")),
        ({"normalise": 0}, ("normalise=0", "true")),
        ({"memory_limit_mb": None}, ("memory_limit_mb=None", "whole number")),
        ({"overlong_buffer": 20}, ("buffer_length=20", "max_response_length")),
    ],
)
def test_settings_that_it_does_not_take_are_named(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    problem = settings_problem(settings) or ""
    assert bool(problem) == bool(parts) and all(part in problem for part in parts), problem
