"""Composes a job's configuration without importing verl, so that the platform can be decided first.

Hydra's ``pkg://verl.trainer.config`` imports verl, and verl fixes its platform while it is imported. :func:`compose`
reads the same files by path instead.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.launch.job import Job

#: Configuration files of the runner, for a job's defaults list.
CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
#: Key under which Hydra is told of further folders with configuration files.
SEARCH_PATH = "hydra.searchpath"
_NESTS: Final = {**dict.fromkeys("[{(", 1), **dict.fromkeys("]})", -1)}
_MAX_DEPTH: Final = 40
#: The end of what is wrong with an override that only adds what is there.
_PLUS: Final = "already; leave the + out"
#: What Hydra and OmegaConf raise for a command or a file.
_REFUSALS: Final = (ConfigCompositionException, OmegaConfBaseException)
#: Groups that hand on whatever they hold: to a function, a server, a model, Ray, an optimizer.
HANDED_ON: Final = re.compile(r"_kwargs\.|override_\w*config\.|runtime_env\.|teacher_models\.|ray_init\.")


def parsed(overrides: Iterable[str]) -> list[Override]:
    """Overrides of a command line, in Hydra's grammar; HydraException for one that is none."""
    words = list(overrides)
    for word in words:  # whoever walks through a value recurses, Hydra's parser first
        if max(itertools.accumulate(_NESTS.get(character, 0) for character in word), default=0) > _MAX_DEPTH:
            raise OverrideParseException(word, f"{word[:80]}...: nested more than {_MAX_DEPTH} deep")
    return OverridesParser.create().parse_overrides(words)


def verl_config_dir() -> Path:
    """Folder of verl's own configuration files; ModuleNotFoundError if verl is not installed."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed; run `make setup`, or pip install -r requirements/gpu.txt")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def key_of(override: Override) -> str:
    """Its key, or its group with the package."""
    return str(override.key_or_group)


def text_of(override: Override) -> str:
    """The word of the command that it is."""
    return str(override.input_line)


def as_written(value: Any) -> str:
    """A value as a command gives it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def own_folders(overrides: Iterable[Override]) -> list[str]:
    """The folders that ``hydra.searchpath=[FOLDER]`` adds, absolute; HydraException if there is no such folder."""
    values = [override.value() for override in overrides if key_of(override) == SEARCH_PATH]
    last = values[-1] if values else []
    return [_absolute(str(folder)) for folder in (last if isinstance(last, list) else [last])]


def absolute_path(path: str) -> str:
    """A path that means the same in another working folder, such as that of Ray's workers; ``pkg://`` as it is."""
    path = path.removeprefix("file://")
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _absolute(folder: str) -> str:
    path = absolute_path(folder)
    if "://" in path:
        return path
    if not Path(path).is_dir():
        raise ConfigCompositionException(
            f"{SEARCH_PATH}: {path} is not a folder; give one that holds folders of groups"
        )
    return f"file://{path}"


def search_path(folders: Sequence[str]) -> str:
    """The override that tells Hydra of these folders."""
    return f"{SEARCH_PATH}=[{','.join(map(quoted, folders))}]"


def quoted(value: object) -> str:
    """A value as a string of Hydra's override grammar, whatever characters it has."""
    return "'" + str(value).replace("'", r"\'") + "'"


class Refused(ConfigCompositionException):
    """All overrides that cannot be composed, a line each.

    Attributes:
        problems: The lines.
        config: Composed from the other overrides, so that its problems can be named too; None if it cannot be composed.
    """

    def __init__(self, problems: Sequence[str], config: DictConfig | None = None) -> None:
        super().__init__("\n".join(problems))
        self.problems, self.config = tuple(problems), config


#: What the groups of a command make: a configuration, and what is wrong with them.
Base = Callable[[Sequence[Override]], tuple[DictConfig, list[str]]]


def compose(job: Job, overrides: Sequence[Override] = (), base_of: Base | None = None) -> DictConfig:
    """The configuration of a job with these overrides, in every form of Hydra's grammar but a sweep.

    Hydra puts the groups together once (or ``base_of`` does, where a run is resumed); the other overrides are looked up
    in that, and applied to it one by one.

    Raises:
        Refused: for unknown options of a group, with the choices, and unknown keys; for a file of the user's that
            cannot be composed; for a group that a run does not have.
        hydra.errors.HydraException: for a folder of configuration files that does not exist.
        Exception: any other comes from an error in a program, not from the command.
    """
    good, problems = _without_named_groups(job, overrides)
    groups = of_groups(job, good)
    base, wrong = base_of(groups) if base_of else composed_groups(job, groups)
    problems += wrong
    config = copy.deepcopy(base)
    values = [override for override in good if override not in groups]
    unknown = _wrong_keys(values, base)
    for override in [*(one for one in values if text_of(one) not in unknown), *_without_plus(unknown)]:
        try:
            apply(override, config)
        except _REFUSALS as error:
            why = " ".join(f"{error} {error.__cause__ or ''}".split())
            unknown[text_of(override)] = f"{text_of(override)}: {why}"
    if problems := [*problems, *unknown.values()]:
        raise Refused(problems, config)
    return config


def apply(override: Override, config: DictConfig) -> None:
    """Change a configuration as one override says; an error of Hydra or OmegaConf if it cannot be."""
    ConfigLoaderImpl._apply_overrides_to_config([override], config)


def defaults(job: Job, overrides: Sequence[Override]) -> DictConfig:
    """The configuration of the groups that overrides choose, without the others. Not to be changed: it is cached."""
    return composed_groups(job, of_groups(job, _without_named_groups(job, overrides)[0]))[0]


def of_groups(job: Job, overrides: Sequence[Override]) -> list[Override]:
    """The overrides that Hydra needs to put the groups together."""
    folders = _folders(job, overrides)

    def is_needed(override: Override) -> bool:
        key = key_of(override)
        is_named = override.package is not None or key.startswith("hydra.")
        return is_named or ("." not in key and _is_group(key, folders))

    return [override for override in overrides if is_needed(override)]


def composed_groups(job: Job, overrides: Sequence[Override]) -> tuple[DictConfig, list[str]]:
    """The configuration of the groups, composed without the wrong overrides, and what is wrong with each of those."""
    good, problems = list(overrides), []
    while True:
        try:
            return _composed(job, good), problems
        except Exception as error:
            wrong = _unknown_options(good, error) or _culprit(job, good, error)
            if not wrong and isinstance(error, _REFUSALS):
                raise Refused([*problems, str(error)]) from error
            if not wrong:
                raise
            good = [*(override for override in good if text_of(override) not in wrong), *_without_plus(wrong)]
            problems += wrong.values()


def _without_plus(wrong: Mapping[str, str]) -> list[Override]:
    """What the overrides mean of which only the + is wrong, so that one start names what else is."""
    return parsed(text.lstrip("+") for text, why in wrong.items() if why.endswith(_PLUS))


def _unknown_options(overrides: Sequence[Override], error: Exception) -> dict[str, str]:
    """The overrides that choose an option which a group does not have, with the choices."""
    if not (isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file):
        return {}
    group, _, option = error.missing_cfg_file.rpartition("/")
    why = f"there is no {group}={option}: give one of {', '.join(error.options)}"
    return {text_of(override): why for override in overrides if key_of(override).partition("@")[0] == group}


def _culprit(job: Job, overrides: Sequence[Override], error: Exception) -> dict[str, str]:
    """The override of a group without which the others compose, and why; a file of the user's is named.

    An error that is none of Hydra's is a file's, or that of a program.
    """
    folders = [Path(folder.removeprefix("file://")) for folder in own_folders(overrides)]
    for override in overrides:
        text, key = text_of(override), key_of(override)
        name = f"{key.partition('@')[0]}/{override.value()}.yaml"
        file = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if key == SEARCH_PATH or (file is None and not isinstance(error, _REFUSALS)):
            continue
        try:
            _composed(job, [other for other in overrides if other is not override])
        except Exception:  # so this one is not the only cause
            continue
        is_twice = re.search("Multiple values|appears more than once", str(error)) is not None
        if override.is_force_add() or (override.is_add() and is_twice):
            return {text: f"{text}: there is {key} {_PLUS}"}
        why = " ".join(f"{type(error).__name__ if file else ''} {str(error) or error.__cause__}".split())
        return {text: f"{text}: {file} cannot be composed ({why}); correct the file" if file else f"{text}: {why}"}
    return {}


def _without_named_groups(job: Job, overrides: Sequence[Override]) -> tuple[list[Override], list[str]]:
    """The overrides without groups named as settings, and the problems of the others."""
    good, problems, folders = list[Override](), list[str](), _folders(job, overrides)
    for override in overrides:
        key = key_of(override)
        if not _is_option(override) and _is_group(key, folders):
            wanted = (
                f"leave it out, write ~{key} for none, or give one of" if override.value() is None else "give one of"
            )
            options = ", ".join(choices(job, key.partition("@")[0], overrides)) or f"its settings, as {key}.NAME=VALUE"
            problems.append(f"{text_of(override)}: {key} is a group of settings; {wanted} {options}")
        else:
            good.append(override)
    return good, problems


def _wrong_keys(overrides: Sequence[Override], base: DictConfig) -> dict[str, str]:
    """Unknown keys, keys added with + that exist, and keys of groups and lists, each with its remedy."""
    added = [key_of(override) for override in overrides if override.is_add() or override.is_force_add()]
    wrong = {}
    for override in overrides:
        text, key, value = text_of(override), key_of(override), override.value()
        if above := _list_above(base, key, overrides):
            wrong[text] = f"{text}: {above} is a list; give the whole of it, {above}=[...]"
        elif is_no_group(base, override):
            wrong[text] = f"{text}: {is_group(key)}"
        elif override.is_force_add():
            continue
        elif override.is_add():
            there = has_key(base, key) and OmegaConf.select(base, key, throw_on_resolution_failure=False) is not None
            if there and not isinstance(value, dict | list):
                wrong[text] = f"{text}: there is {key} {_PLUS}"
        elif not has_key(base, key) and not is_below(key, added):
            way = "leave it out" if override.is_delete() else f"+{text} adds one that code of yours reads"
            wrong[text] = f"{text}: there is no such key; {way}"
    return wrong


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values of a group, and of those inside it. A list is a value, and a missing one (``???``) is null."""
    if isinstance(value, Mapping | DictConfig):
        for name in value:
            yield from leaves(value.get(name), f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def is_below(key: str, parents: Iterable[str]) -> bool:
    """Whether a key is one of these, or lies below one."""
    return any(f"{key}.".startswith(f"{parent}.") for parent in parents)


def has_key(config: DictConfig, key: str) -> bool:
    """Whether a configuration has a key, whatever its value, a missing one (``???``) included."""
    group, _, name = key.rpartition(".")
    try:
        above = OmegaConf.select(config, group, throw_on_resolution_failure=False)
    except (OmegaConfBaseException, TypeError, ValueError):  # below a list
        return False
    if OmegaConf.is_list(above):
        return name.isdigit() and int(name) < len(above)
    return OmegaConf.is_dict(above) and name in list(above)


def select(config: DictConfig, key: str, default: Any) -> Any:
    """``OmegaConf.select``, with the default for a name below a list, too."""
    return OmegaConf.select(config, key, default=default) if has_key(config, key) else default


def _list_above(config: DictConfig, key: str, overrides: Collection[Override]) -> str | None:
    """The list below which a key names something else than an entry, as in ``trainer.logger.console``, or an entry that
    is to be deleted; also a list that another override gives."""
    given = {key_of(other) for other in overrides if isinstance(other.value(), list)}
    deleted = {key_of(other) for other in overrides if other.is_delete()}
    prefixes = list(itertools.accumulate(key.split("."), "{}.{}".format))
    for group, below in itertools.pairwise(prefixes):
        if OmegaConf.is_list(select(config, group, None)) and (below in deleted or not has_key(config, below)):
            return group
        if group in given and not below.removeprefix(f"{group}.").isdigit():
            return group
    return None


def is_group(key: str) -> str:
    """That a key is a group of settings, and what to give."""
    return f"{key} is a group of settings; give {key}.NAME=VALUE, or leave it out"


def is_no_group(base: DictConfig, override: Override) -> bool:
    """Whether an override gives a value to a key that is a group; null is left to the types of the settings."""
    value = override.value()
    if override.is_delete() or value is None or isinstance(value, dict) or "${" in str(value):
        return False
    return OmegaConf.is_dict(select(base, key_of(override), None))


def _is_option(override: Override) -> bool:
    """Whether a value can name an option of a group, or several; Hydra has no error of its own for another."""
    value = override.value()
    if override.is_delete():
        return value is None or isinstance(value, str)
    return isinstance(value, str | dict) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _folders(job: Job, overrides: Iterable[Override]) -> list[Path]:
    """The folders with groups of configuration files."""
    own = (Path(folder.removeprefix("file://")) for folder in own_folders(overrides))
    return [job.config.parent, CONF_DIR, verl_config_dir(), *own]


def _is_group(key: str, folders: Iterable[Path]) -> bool:
    """Whether a key without its package names a group of configuration files."""
    name = key.partition("@")[0]
    return name.partition("/")[0] == "hydra" or (name != "" and any((folder / name).is_dir() for folder in folders))


def _words(overrides: Sequence[Override]) -> list[str]:
    """Hydra's arguments: the search path of all groups, and the overrides that choose among them."""
    path = search_path([f"file://{folder}" for folder in (verl_config_dir(), CONF_DIR)] + own_folders(overrides))
    return [path, *(text_of(override) for override in overrides if key_of(override) != SEARCH_PATH)]


def _composed(job: Job, overrides: Sequence[Override]) -> DictConfig:
    return _compose(job.config, tuple(_words(overrides)))


@functools.lru_cache(maxsize=2)  # prepare() asks for the defaults of the command that was composed
def _compose(root: Path, words: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(config_dir=str(root.parent), version_base=None):
        return hydra_compose(root.stem, overrides=list(words))


def choices(job: Job, group: str, overrides: Sequence[Override] = ()) -> list[str]:
    """The options of a configuration group: those of the job, and those of the user's own folders."""
    folders = [str(job.config.parent), *own_folders(overrides)]
    paths = (Path(folder.removeprefix("file://")) / group for folder in folders)
    return sorted({file.stem for path in paths for file in path.glob("*.yaml")})
