"""A reward function is loaded as verl does, and what is wrong with it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.runner.launch.reward_function import problem_of

ROOT = Path(__file__).parents[2]
GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("text", "name", "keywords", "says"),
    [
        (GOOD, "compute_score", [], None),
        ("class Reward:\n    def __call__(self, *, data_source, **kwargs): ...\nscore = Reward()", "score", [], None),
        ("class Reward:\n    def __call__(self, **kwargs): ...", "Reward", [], "reward = Reward()"),
        ("class Score(dict):\n    def __init__(self, **row): self['score'] = 1.0", "Score", [], None),
        (GOOD, "score", [], "'score'; it has compute_score"),
        (GOOD, "compute_score", ["extra_info"], "extra_info"),
        ("def compute_score(a, b): ...", "compute_score", [], "(a, b)"),
        (GOOD.replace(", **kwargs", ""), "compute_score", ["weight"], "'weight'"),
        (GOOD.replace("**kwargs", "*, weight"), "compute_score", [], "'weight'"),
        ("x = 1 / 0", "compute_score", [], "ZeroDivisionError"),
        ("raise SystemExit(3)", "compute_score", [], "SystemExit: 3"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, name: str, keywords: list[str], says: str | None) -> None:
    file = tmp_path / "reward.py"
    file.write_text(text)
    problem = problem_of(str(file), name, dict.fromkeys(keywords, 1))
    assert (problem is None) if says is None else (problem is not None and says in problem), problem


def test_packages_and_other_files() -> None:
    assert problem_of("pkg://recipe.math.reward", "compute_score", {"time_limit_s": 2}) is None
    assert problem_of("pkg://recipe/math/reward", "compute_score", {}, ["reward_router_address"]) is None
    for path, what in (("/no/reward.py", "does not exist"), (str(ROOT), "is a folder"), (f"{ROOT}/Makefile", ".py")):
        problem = problem_of(path, "compute_score", {}) or ""
        assert path in problem and what in problem and "pkg://" in problem, problem
