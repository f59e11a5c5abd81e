"""A user's reward function is loaded as verl does, and what is wrong with it is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from composing import composed

from fspo.rewards.custom import problem_of
from recipe.runner.launch import reward_function
from recipe.runner.launch.start import prepare

GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("text", "name", "keywords", "says"),
    [
        (GOOD, "compute_score", [], None),
        (GOOD, "compute_score", ["weight"], None),
        ("class Reward:\n    def __call__(self, *, data_source, **kwargs): ...\nscore = Reward()", "score", [], None),
        (GOOD, "score", [], "it has no function 'score'; it has compute_score"),
        (GOOD, "compute_score", ["extra_info"], "reward_kwargs would replace extra_info"),
        ("def compute_score(a, b): ...", "compute_score", [], "it takes (a, b): missing a required argument"),
        (GOOD.replace(", **kwargs", ""), "compute_score", ["weight"], "unexpected keyword argument 'weight'"),
        (GOOD.replace("**kwargs", "*, weight"), "compute_score", [], "missing a required argument: 'weight'"),
        ("x = 1 / 0", "compute_score", [], "importing it raised ZeroDivisionError"),
        ("import no_such_package", "compute_score", [], "No module named 'no_such_package'"),
        ("raise SystemExit(3)", "compute_score", [], "importing it raised SystemExit: 3"),
        ("def compute_score(:", "compute_score", [], "importing it raised SyntaxError"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, name: str, keywords: list[str], says: str | None) -> None:
    file = tmp_path / "reward.py"
    file.write_text(text)
    found = problem_of(str(file), name, keywords)
    assert (found is None) if says is None else (found is not None and says in found), found


def test_packages_and_other_files() -> None:
    assert problem_of("pkg://recipe.fspo.reward", "compute_score", ["time_limit_s"]) is None
    assert problem_of("pkg://recipe/fspo/reward", "compute_score") is None
    assert "No module named 'no_such'" in (problem_of("pkg://no_such.reward", "compute_score") or "")
    assert "there is no file /no/reward.py" in (problem_of("/no/reward.py", "compute_score") or "")


def problems(*overrides: str) -> list[str]:
    config = composed("fspo.run_dir=/nowhere", *overrides)
    prepare(config)
    return list(reward_function.problems(config))


FUNCTION = "reward.custom_reward_function"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{FUNCTION}.name=score"], "name='score': it has no function 'score'"),
        ([f"{FUNCTION}.name=null"], f"{FUNCTION}.name is not set"),
        ([f"+{FUNCTION}.reward_kwargs.solution_str=x"], "reward_kwargs={solution_str}: reward_kwargs would replace"),
        ([f"+{FUNCTION}.reward_kwargs.overlong_bufer=64"], "it knows no overlong_bufer .did you mean overlong_buffer"),
        ([f"+{FUNCTION}.reward_kwargs.overlong_buffer=64"], "overlong_buffer=64 needs max_response_length"),
        (
            [f"+{FUNCTION}.reward_kwargs={{overlong_buffer: 64, max_response_length: 32}}"],
            "buffer_length=64: it must be positive and at most max_response_length=32",
        ),
        ([f"+{FUNCTION}.reward_kwargs.format_weight=abc"], "format_weight='abc' must be a number"),
        ([f"+{FUNCTION}.reward_kwargs.time_limit_s=-1"], "time_limit_s=-1: give a number of seconds between"),
        ([f"+{FUNCTION}.reward_kwargs.memory_limit_mb=1e3"], "memory_limit_mb=1000.0 must be a whole number"),
        ([f"+{FUNCTION}.reward_kwargs.flags=1"], "flags=1 must be true or false"),
        ([f"+{FUNCTION}.reward_kwargs=2"], "reward_kwargs=2 must be a group"),
        ([f"{FUNCTION}.path=null", f"+{FUNCTION}.reward_kwargs.a=2"], "is not used without"),
        (["custom_reward_function.path=x.py"], f"custom_reward_function.path is set, .* use {FUNCTION}"),
        (["reward_model.reward_manager=dapo"], "reward_model.reward_manager is set, .* use reward.reward_model"),
        (["reward.reward_manager.module.path=x.py"], "reward.reward_manager.module.path='/.*/x.py': there is no such"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_by_its_key(overrides: list[str], says: str) -> None:
    (found,) = problems(*overrides)
    assert re.search(says, found), found


def test_settings_of_the_recipes_own_reward_are_known() -> None:
    given = "{overlong_buffer: 64, max_response_length: 256, n_workers: 2, normalise: false, time_limit_s: 2}"
    assert problems(f"+{FUNCTION}.reward_kwargs={given}") == []
    assert problems(f"+{FUNCTION}.reward_kwargs={{overlong_buffer: null}}") == []  # off


def test_a_file_is_imported_in_another_process_under_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(f"import sys\nprint('noise')\nassert 'verl' not in sys.modules\n{GOOD}")
    assert problems(f"{FUNCTION}.path=reward.py") == []
    (found,) = problems(f"{FUNCTION}.path=reward.py", f"{FUNCTION}.name=score")
    assert f"{FUNCTION}.path='{tmp_path}/reward.py', name='score': it has no function 'score'" in found
    Path("reward.py").write_text("import os\nos._exit(7)")
    assert "ended with status 7" in problems(f"{FUNCTION}.path=reward.py")[0]
