"""The reward of a run: the function or manager that its settings name, and what is wrong with it.

Part of the checks before Ray starts (:mod:`recipe.runner.launch.checks`).
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.runner.launch.compose import absolute_path, leaves
from recipe.runner.launch.data_files import data_files, generated_files
from recipe.runner.launch.reward_function import class_problem, problem_of
from recipe.runner.launch.reward_trial import TrialRow, ask, first_rows, rows_of_file
from recipe.runner.launch.values import PreflightError

_REWARD: Final = "reward.custom_reward_function"
#: What verl calls without a reward function of the user's.
_VERLS: Final = ("pkg://verl.utils.reward_score", "default_compute_score")
#: verl's reward groups of before 0.7, whose values are null unless a command has one.
_LEGACY: Final = ("custom_reward_function", "reward_model", "sandbox_fusion")
_MANAGER: Final = "reward.reward_manager"
#: Managers of verl's releases that call the reward as the recipe's does, and know nothing that it does not.
_LIKE_OURS: Final = ("naive", "dapo", "batch", "prime")
#: Rewards that start with this belong to a recipe; to import one starts nothing.
_RECIPES: Final = "pkg://recipe."


def migrate_rewards(config: DictConfig) -> str | None:
    """Move keys of verl's earlier reward groups to ``reward``, in place, by verl's own function; a note of what moved.

    Raises:
        PreflightError: for keys that verl's function moves nowhere.
    """
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    if _LEGACY[0] not in config:  # moved before
        return None
    moved = [key for old in _LEGACY for key, value in leaves(config[old], old) if value is not None]
    if moved:
        marked = copy.deepcopy(config)
        with open_dict(config), open_dict(marked):
            for key in moved:
                OmegaConf.update(marked, key, f"<{key}>")
            # verl takes a group whole, with what is null in it.
            for old in ("custom_reward_function", "sandbox_fusion"):
                if any(key.startswith(old) for key in moved):
                    given = {name: value for name, value in config[old].items() if value is not None}
                    config[old] = OmegaConf.merge(config.reward[old], given)
            text = OmegaConf.to_yaml(migrate_legacy_reward_impl(marked).reward)
        if lost := [key for key in moved if f"<{key}>" not in text]:
            raise PreflightError(f"{', '.join(lost)}: verl's main_ppo no longer reads this; leave it out")
    with open_dict(config):
        migrate_legacy_reward_impl(config)
    return f"verl's migration has moved {', '.join(moved)} to reward.*" if moved else None


def reward_problems(config: DictConfig) -> Iterator[str]:
    """A reward that verl could not load or call, or with which no response could earn anything.

    A manager of the user's may call the function with other arguments, or not at all: the function is loaded then, as
    verl does, and not tried.
    """
    if problem := _manager_problem(config.reward.reward_manager):
        yield problem
    custom, model = config.reward.custom_reward_function, config.reward.reward_model.enable
    settings = OmegaConf.to_container(custom.get("reward_kwargs") or OmegaConf.create(), resolve=True)
    is_tried = not _judges_by_itself(config.reward.reward_manager)
    further = ["reward_router_address", "reward_model_tokenizer"] if model else []
    if custom.path:
        path, name = absolute_path(custom.path), str(custom.name)
        # Without their values: a text may be from the environment.
        keywords = f", keys of reward_kwargs: {', '.join(map(str, settings))}" if settings else ""
        setting = f"{_REWARD}.path={custom.path!r}, name={custom.name!r}{keywords}"
    elif model or OmegaConf.select(config, "reward.sandbox_fusion.url") or problem or not is_tried:
        return
    else:
        path, name, settings = *_VERLS, {}
        setting = f"{_REWARD}.path=null, verl's own reward by data_source"
    if path.startswith(_RECIPES):
        if problem := problem_of(path, name, settings if is_tried else None, further):
            yield f"{setting}: {problem}"
        return
    problem, outcome = ask(path, name, further, (settings, _rows_to_try(config)) if is_tried else (None, []))
    if problem:
        yield f"{setting}: {problem}"
    elif outcome.is_unknown and not custom.path:
        yield f"{setting}: {outcome.failure}: give {_REWARD}.path"
    elif text := outcome.failure or "; ".join(outcome.notes):
        how = "was tried on rows of the data, and failed there: " if outcome.failure else ""
        print(f"note: {setting}: {how}{text}", file=sys.stderr, flush=True)


def _rows_to_try(config: DictConfig) -> list[TrialRow]:
    """Rows of each data source of the run's files; none of a file that :func:`data_problems` refuses."""
    if OmegaConf.select(config, "data.custom_cls.path"):
        return []
    files = dict.fromkeys([*data_files(config.data, "train_files"), *data_files(config.data, "val_files")])
    rows: list[TrialRow] = []
    for file in files:
        if "://" not in file and file not in generated_files(config.data):
            with contextlib.suppress(ValueError, OSError, KeyError):
                rows += rows_of_file(Path(file).expanduser())
    return first_rows(rows)


def reads_text(reward: DictConfig) -> str:
    """The setting of the reward, if it is a recipe's, which reads ground truths that are text; else nothing."""
    path = reward.custom_reward_function.path or ""
    is_read = path.startswith(_RECIPES) and not _judges_by_itself(reward.reward_manager)
    return f"{_REWARD}.path={path}" if is_read else ""


def _judges_by_itself(manager: DictConfig) -> bool:
    """Whether the reward manager is of the user's, and no class of verl's or of a recipe's."""
    path = OmegaConf.select(manager, "module.path")
    return manager.source == "importlib" and bool(path) and not path.startswith(_RECIPES)


def _manager_problem(manager: DictConfig) -> str | None:
    """Why verl could not load the reward manager, which its reward workers try once the models are there."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    source, name, path = manager.source, str(manager.name), OmegaConf.select(manager, "module.path")
    named, verls = f"{_MANAGER}.name={name}", ", ".join(sorted(REWARD_MANAGER))
    of_verl = f"{_MANAGER}.source=register {_MANAGER}.name=naive for verl's, or another of {verls}"
    if source == "register":
        if name not in REWARD_MANAGER:
            return (
                f"{named} with {_MANAGER}.source=register is none of verl's: choose one of {verls}, or give "
                f"{_MANAGER}.source=importlib for a class in {_MANAGER}.module.path={path}"
            )
    elif source != "importlib":
        return f"{_MANAGER}.source={source}: give {of_verl}, or importlib for a class in {_MANAGER}.module.path"
    elif not path:
        return f"{_MANAGER}.module.path={path} with source=importlib: give the module with {name}, or {of_verl}"
    elif problem := class_problem(path, name) if path.startswith(_RECIPES) else ask(path, name)[0]:
        way = f"correct {_MANAGER}.name or module.path"
        if name in _LIKE_OURS or (path.startswith(_RECIPES) and name not in REWARD_MANAGER):
            way = f"leave {_MANAGER}.name (reward_model.reward_manager) out for the recipe's, or {way}"
        elif name in REWARD_MANAGER:
            way = f"{_MANAGER}.source=register takes verl's {name} (what is lost with it: docs/data.md)"
        return f"{named} with module.path={path}: {problem}; {way}"
    return None
