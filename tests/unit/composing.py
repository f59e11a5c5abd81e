"""The configuration of a command, each choice of groups put together once per process: this recipe's, and verl's."""

from __future__ import annotations

import functools
import pickle

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from recipe.fspo import CONF_DIR
from recipe.fspo.config import complete
from recipe.fspo.main import composed as compose
from recipe.runner.launch.machine import on_this_machine
from recipe.runner.launch.settings import parsed

_GROUPS = {path.name for path in CONF_DIR.iterdir() if path.is_dir()}
ALGOS = sorted(path.stem for path in (CONF_DIR / "algo").glob("*.yaml"))


@functools.cache
def _pickled(groups: tuple[str, ...]) -> bytes:
    GlobalHydra.instance().clear()
    return pickle.dumps(compose(groups))


def composed(*overrides: str) -> DictConfig:
    """A configuration of one's own. A wrong key is an error of OmegaConf."""
    by_word = dict(zip(overrides, parsed(overrides), strict=True))
    groups = tuple(word for word, override in by_word.items() if override.key_or_group in _GROUPS)
    config: DictConfig = pickle.loads(_pickled(groups))
    ConfigLoaderImpl._apply_overrides_to_config([by_word[word] for word in overrides if word not in groups], config)
    return config


@functools.cache
def _pickled_of_verl() -> bytes:
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        return pickle.dumps(hydra_compose("ppo_trainer"))


def of_verl(*overrides: str) -> DictConfig:
    """The configuration of verl's own command with these words, none of which chooses a group."""
    config: DictConfig = pickle.loads(_pickled_of_verl())
    ConfigLoaderImpl._apply_overrides_to_config(parsed(overrides), config)
    return config


def completed(*overrides: str) -> DictConfig:
    """The same as a run has it."""
    config = composed(*overrides)
    complete(config)
    return config


def here(config: DictConfig) -> DictConfig:
    """A copy that is resolved and has absolute paths, as a run on this machine has it."""
    config = config.copy()
    on_this_machine(config)
    OmegaConf.resolve(config)
    return config
