"""Composes the configuration without importing verl, so that the platform can be decided first.

Hydra's ``pkg://verl.trainer.config`` (what ``conf/fspo.yaml`` names) imports verl, and verl fixes its platform while it
is imported. :func:`compose` reads the same files by path instead.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.removed import remedy

#: Hydra's flags that are followed by a value.
_FLAGS_WITH_VALUE = {"--cfg", "-c", "--info", "-i", "--package", "-p", "--config-dir", "-cd"}

_RECIPES = Path(__file__).resolve().parents[2]
_IN_WHEEL = _RECIPES / "fspo" / "conf"
#: The shipped configuration: ``conf/`` of a checkout, which a wheel holds as ``recipe/fspo/conf/``.
CONF_DIR = _IN_WHEEL if _IN_WHEEL.is_dir() else _RECIPES.parent / "conf"
ROOT_CONFIG = "fspo"
#: Key under which Hydra is told of further folders with configuration files.
SEARCH_PATH = "hydra.searchpath"
_VERL_PACKAGE = "pkg://verl.trainer.config"
#: What people write for true and false; Hydra reads the first two only.
_LIKE_A_SWITCH = ("true", "false", "yes", "no", "on", "off")
_NO_SUCH_KEY = re.compile(r"Could not override '([^']+)'\.|Could not delete from config\. '([^']+)'")


def verl_config_dir() -> Path:
    """Folder of verl's own configuration files.

    Raises:
        ModuleNotFoundError: if verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed; run `make setup`, or pip install -r requirements/gpu.txt")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def own_folders(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The folders that ``hydra.searchpath=[FOLDER]`` adds, absolute, and the other overrides.

    Hydra's own setting would replace the way to verl's files; here it adds to it.

    Raises:
        hydra.errors.HydraException: for an argument that is no override, or a folder that does not exist.
    """
    folders: list[str] = []
    rest = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group != SEARCH_PATH:
            rest.append(str(override.input_line))
            continue
        value = override.value()
        given = [str(each) for each in (value if isinstance(value, list) else [value])]
        folders = [_absolute(each) for each in given if each not in (_VERL_PACKAGE, f"file://{verl_config_dir()}")]
    return folders, rest


def _absolute(folder: str) -> str:
    """The folder, so that it means the same from another working folder, where the run may be resumed."""
    if "://" in folder and not folder.startswith("file://"):
        return folder
    path = Path(folder.removeprefix("file://")).expanduser().absolute()
    if not path.is_dir():
        raise ConfigCompositionException(f"{SEARCH_PATH}: {path} is not a folder; give the one that holds algo/")
    return f"file://{path}"


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """A command line as Hydra's own application needs it, to find verl's files beside the folders that a user adds.

    Raises:
        hydra.errors.HydraException: as :func:`own_folders`, and for Hydra's flag that does the same for one start only.
    """
    if {"--config-dir", "-cd"} & {each.partition("=")[0] for each in arguments}:
        raise ConfigCompositionException(f"--config-dir: give '{SEARCH_PATH}=[FOLDER]', which the run folder keeps")
    given = [each for each in arguments if each.startswith(f"{SEARCH_PATH}=")]
    if not given:
        return list(arguments)
    path = search_path([_VERL_PACKAGE, *own_folders(given)[0]])
    return [*(each for each in arguments if each not in given), path]


def search_path(folders: Sequence[str]) -> str:
    """The override that tells Hydra of these folders."""
    return f"{SEARCH_PATH}=[{','.join(map(quoted, folders))}]"


def quoted(value: object) -> str:
    """A value as a string of Hydra's override grammar, whatever characters it has."""
    return "'" + str(value).replace("'", r"\'") + "'"


def compose(overrides: Sequence[str] = (), own: Collection[str] = ()) -> DictConfig:
    """The configuration for ``python -m recipe.fspo.main`` with these overrides.

    Args:
        overrides: As on the command line.
        own: Settings of the command itself, which a mistyped key may have been meant for.

    Raises:
        hydra.errors.HydraException: for an unknown group option or key, naming it, the choices and what is like it; for
            a word in place of true or false; for what an earlier version had, saying what to use instead.
    """
    around = GlobalHydra.instance().hydra  # of the Hydra job that this may be called in
    try:
        _check_switches(overrides)
        config = _compose(overrides)
        _refuse_removed(each for each in overrides if each.lstrip("+~").startswith("fspo."))  # +fspo.samples=8 composes
        return config
    except ConfigCompositionException as error:
        _refuse_removed(overrides)
        match = _NO_SUCH_KEY.search(str(error))
        if match is None:
            raise
        like = did_you_mean(match[1] or match[2], _with_groups_of(overrides), {*own, *_groups()})
        said, _, rest = str(error).partition("\n")
        raise ConfigCompositionException("\n".join(line for line in (f"{said}{like}", rest) if line)) from error
    finally:
        GlobalHydra.instance().hydra = around


def _compose(overrides: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    folders, rest = own_folders(overrides)
    path = search_path([f"file://{verl_config_dir()}", *folders])
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base=None):
        return hydra_compose(ROOT_CONFIG, overrides=[path, *rest])


def _refuse_removed(overrides: Iterable[str]) -> None:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = None if override.is_sweep_override() else override.value()
        if sentence := remedy(override.key_or_group, value):
            raise ConfigCompositionException(sentence) from None


def _check_switches(overrides: Sequence[str]) -> None:
    """Refuse ``no`` or ``flase`` where true or false belongs: any word would count as true."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = str(override.key_or_group), override.value()
        if not isinstance(value, str) or not difflib.get_close_matches(value.lower(), _LIKE_A_SWITCH, cutoff=0.7):
            continue
        if isinstance(OmegaConf.select(_with_groups_of(overrides), key), bool):
            raise ConfigCompositionException(f"{key}={value}: give true or false")


def _groups() -> set[str]:
    return {path.name for path in CONF_DIR.iterdir() if path.is_dir()}


def _with_groups_of(overrides: Sequence[str]) -> DictConfig:
    """The configuration that these overrides would change."""
    chosen = {*_groups(), SEARCH_PATH}
    try:
        return _compose([each for each in overrides if each.partition("=")[0] in chosen])
    except HydraException:
        return _compose([])


def did_you_mean(key: str, config: DictConfig, own: Collection[str] = ()) -> str:
    """A sentence with the keys that ``key`` may have been meant for; empty if nothing is like it.

    Either a name at its place is like it, or a longer key ends with it.
    """
    known = dict.fromkeys([*own, *_keys(OmegaConf.to_container(config))])
    parts = key.split(".")
    there = next(n for n in range(len(parts) - 1, -1, -1) if n == 0 or ".".join(parts[:n]) in known)
    place, part = "".join(f"{part}." for part in parts[:there]), parts[there]
    beside = sorted({name.removeprefix(place).partition(".")[0] for name in known if name.startswith(place)})
    like = difflib.get_close_matches(part, beside, 2) or [name for name in beside if part in name][:2]
    found = [long if (long := ".".join([f"{place}{n}", *parts[there + 1 :]])) in known else f"{place}{n}" for n in like]
    for end in (".".join(parts[n:]) for n in range(len(parts))):
        # There is a critic's key beside many of the actor's, and no algorithm of this recipe has a critic.
        longer = sorted((name for name in known if name.endswith(f".{end}")), key=lambda name: ("critic" in name, name))
        if longer and not found:
            found = longer
    return f"\nDid you mean {' or '.join(found[:2])}?" if found else ""


def _keys(values: Any, place: str = "") -> Iterator[str]:
    for name, value in values.items() if isinstance(values, dict) else ():
        yield f"{place}{name}"
        yield from _keys(value, f"{place}{name}.")


def choices(group: str, overrides: Sequence[str] = ()) -> list[str]:
    """The options of a configuration group, such as ``algo``: those shipped, and those of the user's own folders."""
    added = own_folders(overrides)[0]
    folders = [CONF_DIR, *(Path(each.removeprefix("file://")) for each in added)]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


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
