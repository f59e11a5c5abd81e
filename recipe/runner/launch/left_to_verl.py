"""Settings that a command leaves to defaults which differ from verl's (docs/verl.md#your-script)."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator, Sequence
from typing import Any, Final

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.launch.compose import apply, has_key, is_below, key_of, leaves, verl_config_dir
from recipe.runner.launch.masking import masked
from recipe.runner.launch.rewards import migrate_rewards

#: Most lines. Each has one pair of values; the last has all pairs that are left.
_LINES: Final = 18


def verls(config: DictConfig, overrides: Sequence[Override]) -> DictConfig:
    """verl's configuration ``ppo_trainer``, where the keys of ``overrides`` have their values in ``config``.

    Keys of verl's earlier reward groups are moved as verl's command moves them.
    """
    with initialize_config_dir(config_dir=str(verl_config_dir()), version_base=None):
        of_verl = copy.deepcopy(compose("ppo_trainer"))
    with open_dict(of_verl):
        for override in overrides:
            key = key_of(override)
            with contextlib.suppress(HydraException, OmegaConfBaseException):
                if override.is_delete() or not has_key(config, key):
                    if has_key(of_verl, key):
                        apply(override, of_verl)
                elif "." in key and has_key(of_verl, key.partition(".")[0]):
                    OmegaConf.update(of_verl, key, OmegaConf.select(config, key), force_add=True)
    with contextlib.redirect_stdout(io.StringIO()):
        migrate_rewards(of_verl)
    return of_verl


def differing(config: DictConfig, overrides: Sequence[Override]) -> Iterator[tuple[str, Any, Any]]:
    """Key, verl's value and the value in ``config`` of each verl setting that differs and that no override sets."""
    given = [key_of(override) for override in overrides]
    of_verl = verls(config, overrides)
    for key, _ in leaves(OmegaConf.to_container(of_verl)):
        if is_below(key, given) or not has_key(config, key):
            continue
        value, here = (OmegaConf.select(of, key, throw_on_resolution_failure=False) for of in (of_verl, config))
        is_made_absolute = "/" in str(value) and str(here).strip("[]'").endswith(str(value).lstrip("~."))
        if value != here and not is_made_absolute:
            yield key, value, here


def lines(config: DictConfig, overrides: Sequence[Override]) -> list[str]:
    """The settings of :func:`differing` with both values. Settings with the same two values share a line."""
    groups: dict[str, list[str]] = {}
    for key, value, here in differing(config, overrides):
        groups.setdefault(f"{_text(value, key)} -> {_text(here, key)}", []).append(key)
    texts = [f"{', '.join(keys)}: {values}" for values, keys in groups.items()]
    last = [f"  {'; '.join(texts[_LINES - 1 :])}"] if len(texts) >= _LINES else []
    head = "not in your command, verl's default -> here (give KEY=VALUE for verl's; docs/verl.md#your-script):"
    return [head, *(f"  {text}" for text in texts[: _LINES - 1]), *last] if texts else []


def _text(value: Any, key: str) -> str:
    return "null" if value is None else str(masked(value, key))
