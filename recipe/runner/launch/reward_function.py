"""The reward function of a run: where it is, and what is wrong with it.

Part of the checks before Ray starts (:mod:`recipe.runner.launch.checks`). A module of the user's is imported in a
process of its own: it may import anything, and start anything.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf, open_dict

from fspo.rewards.custom import load, problem_of

_KEY: Final = "reward.custom_reward_function"
_OURS: Final = "pkg://recipe.fspo."
#: The recipe's own reward: it tells what is wrong with its settings, and reads a ground truth that is text.
_OWN: Final = ("pkg://recipe.fspo.reward", "compute_score")
_FILE: Final = "file://"
#: Some modules load a model while they are imported.
_LOAD_LIMIT_S: Final = 300
#: Keys of verl's configuration that its main_ppo no longer reads.
_OLD_KEYS: Final = {
    "custom_reward_function": _KEY,
    "reward_model": "reward.reward_model, reward.reward_manager or reward.num_workers",
    "sandbox_fusion": "reward.sandbox_fusion",
}


def absolute_path(path: str) -> str:
    """A path that means the same to a worker of Ray, which has another working folder; ``pkg://`` as it is."""
    path = path.removeprefix(_FILE)
    return path if "://" in path else str(Path(path).expanduser().absolute())


def make_absolute(config: DictConfig) -> None:
    """Paths of files of the user's that verl's reward workers load, in place."""
    for holder in (config.reward.custom_reward_function, config.reward.reward_manager.module):
        if holder.get("path"):
            with open_dict(holder):
                holder.path = absolute_path(holder.path)


def is_own(config: DictConfig) -> bool:
    """Whether a run has the recipe's own reward."""
    custom = config.reward.custom_reward_function
    return (custom.path, custom.name) == _OWN


def problems(config: DictConfig) -> Iterator[str]:
    """A reward that verl could not load or call, and keys that it would not read."""
    for old, new in _OLD_KEYS.items():
        for key in _that_are_set(config.get(old), old):
            yield f"{key} is set, and verl's main_ppo no longer reads {old}: use {new}"
    custom = config.reward.custom_reward_function
    manager = config.reward.reward_manager
    file = absolute_path(manager.module.path) if manager.source == "importlib" and manager.module.path else ""
    if file.startswith("/") and not Path(file).is_file():
        yield f"reward.reward_manager.module.path={manager.module.path!r}: there is no such file"
    if not custom.path:
        if "reward_kwargs" in custom:
            yield f"{_KEY}.reward_kwargs is not used without {_KEY}.path: give the reward function"
        return
    if not custom.name:
        yield f"{_KEY}.name is not set: give the name of the function in {custom.path}, such as compute_score"
        return
    keywords = custom.get("reward_kwargs", {})
    if not OmegaConf.is_dict(keywords) and not isinstance(keywords, dict):
        yield f"{_KEY}.reward_kwargs={keywords!r} must be a group of names and values, such as {{weight: 0.1}}"
        return
    settings = {str(name): keywords[name] for name in keywords}
    keywords = list(settings)
    if config.reward.reward_model.enable:
        keywords += ["reward_router_address", "reward_model_tokenizer"]
    problem = _problem_of(absolute_path(custom.path), custom.name, keywords)
    if problem is None and is_own(config):
        problem = load(custom.path, "settings_problem")(settings)
    if problem:
        given = f", reward_kwargs={{{', '.join(keywords)}}}" if keywords else ""
        yield f"{_KEY}.path={custom.path!r}, name={custom.name!r}{given}: {problem}"


def _that_are_set(value: Any, key: str) -> Iterator[str]:
    if OmegaConf.is_dict(value):
        for name in value:
            yield from _that_are_set(value[name], f"{key}.{name}")
    elif value is not None:
        yield key


def _problem_of(path: str, name: str, keywords: list[str]) -> str | None:
    if path.startswith(_OURS):  # imports nothing heavy, and starts nothing
        return problem_of(path, name, keywords)
    command = [sys.executable, "-m", "fspo.rewards.custom", path, name, *keywords]
    try:
        loaded = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it was not imported within {_LOAD_LIMIT_S} s; every reward worker would have to wait as long"
    if loaded.returncode:
        return f"the process that imported it ended with status {loaded.returncode}: {loaded.stderr.strip()[-2000:]}"
    return loaded.stdout or None
