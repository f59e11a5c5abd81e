"""A user's reward, tried before Ray on rows of his data: whether it can be called, and whether a response can earn.

``python -m recipe.runner.launch.check_reward PATH NAME`` imports it in a process of its own, so that whatever the
module starts ends there. Its settings and the rows, pickled, come by standard input; the answer is what :func:`found`
returns, as a JSON list.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.check_data import rows_to_try
from recipe.runner.launch.problems import MachineProblem
from recipe.runner.launch.reward_function import BadReward, call, call_problem, load, result_problem

_REWARD: Final = "reward.custom_reward_function"
_MANAGER: Final = "reward.reward_manager"
#: What verl calls without a reward function of the user's.
_VERLS: Final = ("pkg://verl.utils.reward_score", "default_compute_score")
#: Rewards and managers that start with this are this repository's.
_RECIPES: Final = "pkg://recipe."
#: For the import and all calls; some modules load a model while they are imported.
_LIMIT_S: Final = 300
#: What the manager adds to a row's extra_info.
_OF_A_RUN: Final = {"num_turns": 2, "rollout_reward_scores": {}}

Row = tuple[str, Mapping[str, Any]]


def reward_problems(config: DictConfig) -> Iterator[str]:
    """A reward that verl could not load or call, or that raises on rows of the data."""
    reward = config.reward
    if problem := _manager_problem(reward.reward_manager):
        yield problem
        return
    path, name = reward.custom_reward_function.path, str(reward.custom_reward_function.name)
    settings = OmegaConf.to_container(reward.custom_reward_function.get("reward_kwargs") or OmegaConf.create())
    manager = OmegaConf.select(reward, "reward_manager.module.path")
    if reward.reward_manager.source == "importlib" and not str(manager).startswith(_RECIPES):
        settings = None  # a manager of the user's calls it as it likes: it is loaded only
    if not path and (reward.reward_model.enable or OmegaConf.select(reward, "sandbox_fusion.url") or settings is None):
        return
    setting = f"{_REWARD}.path={path}, name={name}" if path else f"{_REWARD}.path=null, verl's own by data_source"
    further = ["reward_router_address", "reward_model_tokenizer"] if reward.reward_model.enable else []
    rows = [] if further else rows_to_try(config)
    if not path:
        path, name = _VERLS
    tried = found if str(path).startswith(_RECIPES) else _asked  # the recipe's starts nothing when it is imported
    problem, failure, note = tried(str(path), name, settings, further, rows)
    if problem:
        yield f"{setting}: {problem}"
    elif failure:  # what it asks may be on the run's machine
        yield MachineProblem(f"{setting}: {failure}")
    elif note:
        print(f"note: {setting}: {note}", file=sys.stderr, flush=True)


def _manager_problem(manager: DictConfig) -> str | None:
    """Why verl could not load the reward manager, which its reward workers try once the models are there."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    name, path = str(manager.name), OmegaConf.select(manager, "module.path")
    named, verls = f"{_MANAGER}.name={name}", ", ".join(sorted(REWARD_MANAGER))
    if manager.source == "register":
        return None if name in REWARD_MANAGER else f"{named} is none of verl's: choose one of {verls}"
    if manager.source != "importlib" or not path:
        return f"{_MANAGER}.source={manager.source} with module.path={path}: give register, or importlib with a path"
    try:
        load(str(path), name)
    except BadReward as error:
        return f"{named} with module.path={path}: {error}; {_MANAGER}.source=register takes one of {verls}"
    return None


def _asked(
    path: str, name: str, settings: Mapping[str, Any] | None, further: Sequence[str], rows: Sequence[Row]
) -> tuple[str, str, str]:
    """:func:`found` in a process of its own; secrets may be among the settings, so they come by standard input."""
    command = [sys.executable, "-m", __name__, path, name]
    try:
        given = pickle.dumps((settings, list(further), list(rows)))
        ended = subprocess.run(command, input=given, capture_output=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"it has not been imported and called within {_LIMIT_S} s", ""
    try:
        problem, failure, note = json.loads(ended.stdout)
        return problem, failure, note
    except ValueError:  # it ended before it could answer
        errors = ended.stderr.decode(errors="replace").strip()[-2000:]
        return f"the process that imported it ended with status {ended.returncode}: {errors}", "", ""


def found(
    path: str, name: str, settings: Mapping[str, Any] | None, further: Sequence[str], rows: Sequence[Row]
) -> tuple[str, str, str]:
    """What stops a start with a reward, how a call of it fails, and what is worth a note.

    Args:
        path: ``pkg://package.module`` or a file.
        name: Of the function.
        settings: verl's ``reward_kwargs``; None: it is loaded only.
        further: Names of keywords that verl adds.
        rows: Places and rows, each tried with usual forms of its ground truth and with an empty response.
    """
    try:
        function = load(path, name)
        if settings is None:
            return "", "", ""
        if problem := call_problem(function, [*settings, *further]):
            return problem, "", ""
    except BadReward as error:
        return str(error), "", ""
    try:
        earned = {str(row["data_source"]): False for _, row in rows}
        for place, row in rows:
            scores = [_score(function, settings, place, row, text) for text in ("", *forms(_truth(row)).values())]
            earned[str(row["data_source"])] |= max(scores) > scores[0]
    except BadReward as error:
        return "", str(error), ""
    unearned = [source for source, is_earned in earned.items() if not is_earned]
    note = f"no usual form of the ground truth earns more than an empty response: data_source={', '.join(unearned)}"
    return "", "", note if unearned else ""


def _truth(row: Mapping[str, Any]) -> Any:
    return row["reward_model"].get("ground_truth")


def forms(truth: Any) -> dict[str, str]:
    """How responses usually write an answer, by name; of a list the first."""
    while isinstance(truth, list | tuple) and truth:
        truth = truth[0]
    usual = {"bare": "{}", "\\boxed{}": "\\boxed{{{}}}", "The answer is": "The answer is {}.", "####": "#### {}"}
    return {name: form.format(truth) for name, form in usual.items()}


def _score(
    function: Callable[..., Any], settings: Mapping[str, Any], place: str, row: Mapping[str, Any], response: str
) -> float:
    """The score of a response. Raises BadReward, whose message begins with the row, for a call that fails."""
    info = {**(row.get("extra_info") or {}), **_OF_A_RUN, "response_length": len(response)}
    try:
        result = call(function, row["data_source"], response, _truth(row), info, settings=settings)
        if problem := result_problem(result):
            raise BadReward(problem)
    except BadReward as error:
        raise BadReward(f"{place} ({row['data_source']}), response {response!r}: {error}") from error
    return float(result["score"] if isinstance(result, Mapping) else result)


def scores_of_the_usual_forms(config: DictConfig, rows: Sequence[Row]) -> dict[str, float]:
    """What the forms of the first row's truth score; empty if the reward is not the recipe's own."""
    own = config.reward.custom_reward_function
    if not rows or not str(own.path).startswith(_RECIPES):
        return {}
    function, (place, row) = load(str(own.path), str(own.name)), rows[0]
    settings = OmegaConf.to_container(own.get("reward_kwargs") or OmegaConf.create())
    return {name: _score(function, settings, place, row, text) for name, text in forms(_truth(row)).items()}


def _answer(path: str, name: str) -> None:
    """Write the answer to standard output, and end, whatever still runs here.

    What the user's code or its child processes write to file descriptor 1 meanwhile goes to standard error.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        output.write(json.dumps(found(path, name, *pickle.loads(sys.stdin.buffer.read()))))
    last = threading.Timer(5.0, os._exit, (0,))  # what the module has registered to run at the end has so long
    last.daemon = True
    last.start()


if __name__ == "__main__":
    _answer(*sys.argv[1:])
