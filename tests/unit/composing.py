"""``composed()``: what ``compose()`` gives, faster: Hydra takes half a second to put the groups together."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Collection, Sequence
from unittest import mock

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from recipe.fspo import CONF_DIR
from recipe.fspo.job import compose
from recipe.runner.launch.compose import SEARCH_PATH

#: The groups of a run, and what is chosen unless a command says otherwise.
_DEFAULTS = {
    group: option
    for entry in yaml.safe_load((CONF_DIR / "fspo.yaml").read_text(encoding="utf-8"))["defaults"]
    if isinstance(entry, dict)
    for group, option in entry.items()
    if " " not in group and option is not None
}


_load = FileConfigSource.load_config
_FILES: dict[tuple[str, str], bytes] = {}


def _load_once(source: FileConfigSource, name: str) -> ConfigResult:
    """Half of the time goes into reading verl's files, which are the same for each choice."""
    if (source.path, name) not in _FILES:
        _FILES[source.path, name] = pickle.dumps(_load(source, name))
    loaded: ConfigResult = pickle.loads(_FILES[source.path, name])
    return loaded


@functools.cache
def _pickled(choices: tuple[tuple[str, str], ...]) -> bytes:
    with mock.patch.object(FileConfigSource, "load_config", _load_once):
        return pickle.dumps(compose([f"{group}={option}" for group, option in choices]))


def composed(*overrides: str) -> DictConfig:
    """A configuration of one's own: groups are composed once per process, values are set afterwards, as Hydra does."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    if any(override.is_sweep_override() for override in parsed):
        return compose(overrides)  # refuses it
    groups = {*_DEFAULTS, SEARCH_PATH}
    chosen = {override.key_or_group: str(override.value()) for override in parsed if override.key_or_group in groups}
    config: DictConfig = pickle.loads(_pickled(tuple((_DEFAULTS | chosen).items())))
    values = [override for override in parsed if override.key_or_group not in groups]
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


def defaults_of(*overrides: str) -> DictConfig:
    """The configuration of the groups that overrides choose, without the others."""
    return composed(*(word for word in overrides if "." not in word.partition("=")[0]))


def composed_from(overrides: Sequence[str] = (), own: Collection[str] = ()) -> DictConfig:
    """:func:`composed` in the form of ``compose``, to stand in for it in a module under test."""
    return composed(*overrides)
