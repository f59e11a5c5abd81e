"""A reward, tried before Ray on rows of the run's data: whether verl can load and call it, and a response can earn.

``python -m recipe.runner.launch.check_reward ANSWER`` tries a user's in a process of its own, which ends with whatever
the module has started. Configuration and rows come pickled by standard input, because secrets may be among them.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.check_data import rows_to_try
from recipe.runner.launch.problems import MachineProblem

#: Rewards and managers that start with this are this repository's, and start nothing when they are imported.
_RECIPES: Final = "pkg://recipe."
#: For the import and all calls; some modules load a model while they are imported.
_LIMIT_S: Final = 300

Row = tuple[str, Mapping[str, Any]]


def reward_problems(config: DictConfig) -> Iterator[str]:
    """A reward or its manager that verl could not load or call, or that raises on rows of the data."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    reward, own, manager = config.reward, config.reward.custom_reward_function, config.reward.reward_manager
    try:
        resolve_reward_manager_cls(config)
    except Exception as error:
        known = ", ".join(sorted(REWARD_MANAGER))
        yield f"reward.reward_manager.name={manager.name} with source={manager.source}: {error}; verl has {known}"
        return
    # A manager of the user's calls it as it likes, and a server that it asks is not there yet: it is loaded only.
    users_manager = manager.source == "importlib" and not str(manager.module.path).startswith(_RECIPES)
    asks = reward.reward_model.enable or OmegaConf.select(reward, "sandbox_fusion.url")
    rows = [] if users_manager or asks else rows_to_try(config.data)
    is_users = own.path and not str(own.path).startswith(_RECIPES)
    problem, failure, note = (_asked if is_users else tried)(
        {"reward": OmegaConf.to_container(reward, resolve=True)}, rows
    )
    setting = f"reward.custom_reward_function.path={own.path}, name={own.name}"
    if problem:
        yield f"{setting}: {problem}"
    elif failure:  # what a call asks may be on the run's machine
        yield MachineProblem(f"{setting}: {failure}")
    elif note:
        print(f"note: {setting}: {note}", file=sys.stderr, flush=True)


def _asked(reward: Mapping[str, Any], rows: Sequence[Row]) -> tuple[str, str, str]:
    """:func:`tried` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+b") as log:
        answer = Path(folder, "answer")
        command, given = [sys.executable, "-m", __name__, str(answer)], pickle.dumps((reward, list(rows)))
        try:
            ended = subprocess.run(command, input=given, stdout=log, stderr=log, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return "", f"it has not been imported and called within {_LIMIT_S} s", ""
        if not answer.exists():
            log.seek(0)
            last = log.read().decode(errors="replace").strip()[-2000:]
            return f"the process that imported it ended with status {ended.returncode}: {last}", "", ""
        problem, failure, note = json.loads(answer.read_text(encoding="utf-8"))
        return problem, failure, note


def tried(reward: Mapping[str, Any], rows: Sequence[Row]) -> tuple[str, str, str]:
    """Why a reward cannot be loaded, how a call of it fails, and what is worth a note.

    ``reward`` is the group of that name in plain containers. Each row is tried with the usual forms of its ground truth
    and with an empty response.
    """
    try:
        function = _loaded(reward)
    except (Exception, SystemExit) as error:
        cause = error.__cause__ or error  # of verl's error that of the module
        said = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        return f"it cannot be loaded ({said}): correct path, name or file, or install what it imports", "", ""
    earned, place = dict[str, bool](), ""
    try:
        for where, row in rows:
            scores = []
            for text in ("", *forms(_truth(row)).values()):
                place = f"{where}, response {text!r}"
                scores.append(_score(function, row, text))
            source = str(row["data_source"])
            earned[source] = earned.get(source, False) or max(scores) > scores[0]
    except (Exception, SystemExit) as error:
        return "", f"{place}: {''.join(traceback.format_exception(error, limit=-3)).rstrip()}", ""
    unearned = [source for source, is_earned in earned.items() if not is_earned]
    note = f"no usual form of the ground truth earns more than an empty response: data_source={', '.join(unearned)}"
    return "", "", note if unearned else ""


def _loaded(reward: Mapping[str, Any]) -> Callable[..., Any]:
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.import_utils import load_module
    from verl.utils.reward_score import get_default_compute_score

    config = OmegaConf.create(dict(reward))
    try:
        own: Callable[..., Any] | None = get_custom_reward_fn(config)
    except AttributeError as error:  # verl does not say what the module has
        members = vars(load_module(config.reward.custom_reward_function.path))
        functions = ", ".join(name for name, member in members.items() if inspect.isfunction(member))
        raise AttributeError(f"{error} Its functions: {functions or 'none'}") from None
    return own or get_default_compute_score(config.reward.reward_manager.name)  # type: ignore[no-any-return]


def _truth(row: Mapping[str, Any]) -> Any:
    return row["reward_model"].get("ground_truth")


def forms(truth: Any) -> dict[str, str]:
    """How responses usually write an answer, by name; of a list the first."""
    while isinstance(truth, list | tuple) and truth:
        truth = truth[0]
    usual = {"bare": "{}", "\\boxed{}": "\\boxed{{{}}}", "The answer is": "The answer is {}.", "####": "#### {}"}
    return {name: form.format(truth) for name, form in usual.items()}


def number(score: Any) -> float:
    """A score as a number. Raises ValueError or TypeError if it is none, or not finite."""
    if isinstance(score, str) or not math.isfinite(score):
        raise ValueError(f"the reward is {score!r}, which is not a finite number")
    return float(score)


def _score(function: Callable[..., Any], row: Mapping[str, Any], response: str) -> float:
    """The score of a response; called as verl's manager does, in a thread."""
    # What the manager adds.
    added = {"num_turns": 2, "rollout_reward_scores": {}, "response_length": len(response)}
    arguments = {
        "data_source": row["data_source"],
        "solution_str": response,
        "ground_truth": _truth(row),
        "extra_info": {**(row.get("extra_info") or {}), **added},
    }
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(lambda: function(**arguments)).result()
    result = asyncio.run(result) if inspect.iscoroutine(result) else result
    return number(result["score"] if isinstance(result, dict) else result)


def scores_of_the_usual_forms(config: DictConfig, rows: Sequence[Row]) -> dict[str, float]:
    """What the forms of the first row's truth score; empty if the reward is not the recipe's own."""
    if not rows or not str(config.reward.custom_reward_function.path).startswith(_RECIPES):
        return {}
    function = _loaded({"reward": OmegaConf.to_container(config.reward, resolve=True)})
    return {name: _score(function, rows[0][1], text) for name, text in forms(_truth(rows[0][1])).items()}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(tried(*pickle.loads(sys.stdin.buffer.read()))), encoding="utf-8")
    os._exit(0)  # whatever the module has started
