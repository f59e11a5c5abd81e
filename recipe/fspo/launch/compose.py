"""Composes the configuration without importing verl, so that the platform can be decided first.

Hydra's ``pkg://verl.trainer.config`` (what ``conf/fspo.yaml`` names) imports verl, and verl fixes its platform while it
is imported. :func:`compose` reads the same files by path instead.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

#: Hydra's flags that are followed by a value.
_FLAGS_WITH_VALUE = {"--cfg", "-c", "--info", "-i", "--package", "-p", "--config-dir", "-cd"}

_RECIPE = Path(__file__).resolve().parents[1]
#: The shipped configuration: ``conf/`` of a checkout, which a wheel holds as ``recipe/fspo/conf/``.
CONF_DIR = next((path for path in (_RECIPE / "conf", _RECIPE.parents[1] / "conf") if path.is_dir()), _RECIPE / "conf")
ROOT_CONFIG = "fspo"


def verl_config_dir() -> Path:
    """Folder of verl's own configuration files.

    Raises:
        ModuleNotFoundError: if verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed; run `make setup`, or pip install -r requirements/gpu.txt")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration for ``python -m recipe.fspo.main`` with these overrides.

    Raises:
        hydra.errors.HydraException: for an unknown group option or key, naming it and the choices.
    """
    search_path = f"hydra.searchpath=[file://{verl_config_dir()}]"
    around = GlobalHydra.instance().hydra  # of the Hydra job that this may be called in
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(CONF_DIR), version_base=None):
            return hydra_compose(ROOT_CONFIG, overrides=[search_path, *overrides])
    finally:
        GlobalHydra.instance().hydra = around


def choices(group: str) -> list[str]:
    """The shipped options of a configuration group, such as ``algo``."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def without_flags(arguments: Sequence[str]) -> list[str]:
    """The Hydra overrides among the command-line arguments (flags such as --multirun are Hydra's own)."""
    after_flag = [False, *(argument in _FLAGS_WITH_VALUE for argument in arguments)]
    return [each for each, value in zip(arguments, after_flag, strict=False) if not (value or each.startswith("-"))]


def first_of_each_sweep(overrides: Sequence[str]) -> list[str]:
    """The overrides with every sweep (``algo=fspo,gspo``) replaced by its first element.

    A multirun sweeps over algorithms and seeds, not over machines, so the first combination decides the platform.
    """
    parser = OverridesParser.create()
    chosen = []
    for override in parser.parse_overrides(list(overrides)):
        if override.is_sweep_override():
            first = next(iter(override.sweep_string_iterator()))
            chosen.append(f"{override.get_key_element()}={first}")
        else:
            chosen.append(str(override.input_line))
    return chosen
