"""Configurations for tests that look at values: Hydra takes most of a second for each, so groups are composed once."""

from __future__ import annotations

import copy
import functools

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.fspo.launch.compose import compose

_GROUPS = ("advantage", "algo", "experiment", "grad_scale")


@functools.cache
def _composed(choices: tuple[str, ...]) -> DictConfig:
    return compose(list(choices))


def composed(*overrides: str) -> DictConfig:
    """What ``compose(overrides)`` gives, as a copy of its own; values are set after the groups have been composed."""
    choices = tuple(override for override in overrides if override.partition("=")[0] in _GROUPS)
    config = copy.deepcopy(_composed(choices))
    values = OverridesParser.create().parse_overrides([o for o in overrides if o not in choices])
    for override in values:
        key = override.key_or_group
        if not override.is_add() and OmegaConf.select(config, key, default=OmegaConf) is OmegaConf:
            raise KeyError(f"{key} is not in the configuration; +{key}=... adds it")
        with open_dict(config):
            OmegaConf.update(config, key, override.value())
    return config
