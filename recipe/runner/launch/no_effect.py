"""Keys of a command line that another setting disables, or that nothing reads.

``no_effect.yaml`` is the table, and says what a row means; a job adds rows of its own
(:attr:`recipe.runner.launch.job.Job.no_effect`). A key counts if the user gave it, on the command line or, in a resumed
run, when the run began; a default or an experiment's value does not.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fspo.names import did_you_mean
from recipe.runner.launch import agents, inputs
from recipe.runner.launch.compose import (
    CONF_DIR,
    HANDED_ON,
    as_written,
    has_key,
    key_of,
    leaves,
    select,
    verl_config_dir,
)
from recipe.runner.launch.job import Job

#: The runner's rows.
TABLE: Final = Path(__file__).with_suffix(".yaml")
#: Their names disable nothing: verl switches the queue on itself, and does not read the other.
_NO_SWITCHES: Final = ("transfer_queue.enable", "actor_rollout_ref.rollout.multi_turn.enable")
_OPERATORS: Final = {">": operator.gt, "<=": operator.le}
_PAGE: Final = "docs/settings.md#keys-without-effect"
_UNKNOWN: Final = "neither verl's code nor this recipe's has the name"
_ABSENT: Final = object()


def _epochs_end_it(config: DictConfig) -> bool:
    last, by_epochs = config.trainer.total_training_steps, inputs.steps_of_epochs(config)
    return last is not None and by_epochs is not None and by_epochs < last


def _steps_end_it(config: DictConfig) -> bool:
    return config.trainer.total_training_steps is not None and not _epochs_end_it(config)


def _shows_no_texts(config: DictConfig) -> bool:
    logger = config.trainer.logger
    return {*([logger] if isinstance(logger, str) else logger)} <= {"console", "file", "rl_insight"}


def _is_unread(function: Callable[..., Any] | None, key: str) -> bool:
    """Whether a function of verl's does not have the key's name; of other functions nothing is known."""
    if function is None or not function.__module__.startswith("verl."):
        return False
    return not re.search(rf"\b{key.rpartition('.')[2]}\b", inspect.getsource(inspect.unwrap(function)))


def _loss_leaves_out(config: DictConfig, key: str) -> bool:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return _is_unread(POLICY_LOSS_REGISTRY.get(config.actor_rollout_ref.actor.policy_loss.loss_mode), key)


def _estimator_leaves_out(config: DictConfig, key: str) -> bool:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return _is_unread(ADV_ESTIMATOR_REGISTRY.get(str(config.algorithm.adv_estimator)), key)


#: The sentences that a condition may have, each with the setting that it is about.
_SENTENCES: Final[Mapping[str, tuple[str, Callable[[DictConfig, str], bool]]]] = {
    "the steps end the run": ("trainer.total_training_steps", lambda config, key: _steps_end_it(config)),
    "the epochs end the run": ("trainer.total_epochs", lambda config, key: _epochs_end_it(config)),
    "every response has one turn": (
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        lambda config, key: agents.takes_one_turn(config),
    ),
    "no logger shows texts": ("trainer.logger", lambda config, key: _shows_no_texts(config)),
    "the loss does not read it": ("actor_rollout_ref.actor.policy_loss.loss_mode", _loss_leaves_out),
    "the estimator does not read it": ("algorithm.adv_estimator", _estimator_leaves_out),
}


@dataclass(frozen=True)
class Row:
    """A row of a table; ``no_effect.yaml`` says what its fields mean."""

    keys: tuple[str, ...]
    when: str = ""
    give: str | None = None
    always: bool = False

    def disables(self, key: str, config: DictConfig) -> bool:
        """Whether the row is about the key, and its condition holds."""
        if not any(fnmatchcase(key, pattern) for pattern in self.keys):
            return False
        clauses = (clause.split(" and ") for clause in self.when.split(" or "))
        return not self.when or any(all(_holds(term, key, config) for term in clause) for clause in clauses)

    def switches(self, key: str, config: DictConfig) -> dict[str, Any]:
        """The settings of the condition, with their values; without the key itself."""
        terms = re.split(" and | or ", self.when) if self.when else []
        names = [name for term in terms for name in _names(term)]
        return {place: value for place, value in (_setting(name, key, config) for name in names) if place != key}


@functools.cache
def rows_of(table: Path) -> tuple[Row, ...]:
    """The rows of a table, in order; TypeError for a field that a row does not have."""
    rows = []
    for groups, of_groups in yaml.safe_load(table.read_text(encoding="utf-8")).items():
        for names, content in of_groups.items():
            keys = tuple(f"{group}.{name}" for group in groups.split() for name in names.split())
            rows += [Row(keys, **row) for row in (content if isinstance(content, list) else [content])]
    return tuple(rows)


def _names(term: str) -> list[str]:
    if term in _SENTENCES:
        return [_SENTENCES[term][0]]
    name, _, value = term.split()
    return [name, *([value[1:]] if value.startswith("$") else [])]


def _setting(name: str, key: str, config: DictConfig) -> tuple[str, Any]:
    """Key and value of a setting that stands beside ``key``, or in a group above it; null where there is none."""
    groups = key.split(".")[:-1]
    places = (".".join([*groups[:n], name]) for n in range(len(groups), -1, -1))
    place = next((place for place in places if has_key(config, place)), name)
    return place, select(config, place, None)


def _holds(term: str, key: str, config: DictConfig) -> bool:
    if term in _SENTENCES:
        return _SENTENCES[term][1](config, key)
    name, compares, value = term.split()
    _, left = _setting(name, key, config)
    if compares in _OPERATORS:
        return left is not None and _OPERATORS[compares](left, float(value))
    if value.startswith("$"):
        is_equal = left == _setting(value[1:], key, config)[1]
    else:
        is_equal = any(fnmatchcase(as_written(left), pattern) for pattern in value.split("|"))
    return is_equal == {"==": True, "!=": False}[compares]


def _is_switched_off(key: str, config: DictConfig) -> bool:
    """Whether a group above the key has ``enable`` or ``enabled`` false."""
    groups = key.split(".")[:-1]
    above = (".".join(groups[:n]) for n in range(1, len(groups) + 1))
    switches = [f"{group}.{name}" for group in above for name in ("enable", "enabled")]
    return any(select(config, at, None) is False for at in switches if at not in (key, *_NO_SWITCHES))


def values_of(config: DictConfig, overrides: Iterable[Override]) -> dict[str, Any]:
    """Key and value of every override; those of groups of the configuration are left out."""
    keys = map(key_of, overrides)
    values = {key: select(config, key, _ABSENT) for key in keys if "." in key}
    return dict(leaf for key, value in values.items() if value is not _ABSENT for leaf in leaves(value, key))


def judged(
    config: DictConfig,
    job: Job,
    overrides: Sequence[Override],
    without: DictConfig,
    begun_with: Sequence[Override] = (),
) -> tuple[list[str], list[str]]:
    """The sentences that refuse a run, and those that a person should read.

    Args:
        config: The prepared configuration, before the run folder changes what the run begins with.
        job: The kind of run.
        overrides: Those that composed it, those of a resumed run's first command among them.
        without: The configuration of their groups, without the other overrides.
        begun_with: The overrides with which the run has trained already: no reason to refuse it.
    """
    rows = (*(rows_of(job.no_effect) if job.no_effect else ()), *rows_of(TABLE))
    values, trained_with = values_of(config, overrides), set(map(key_of, begun_with))
    added = values_of(config, (override for override in overrides if override.is_add() or override.is_force_add()))
    refused, idle, unknown = dict[str, list[str]](), list[str](), list[str]()
    for key, value in values.items():
        row = next((row for row in rows if row.disables(key, config)), None)
        if row is None or row.give is None:
            if row is not None or _is_switched_off(key, config):
                idle.append(key)
            elif key in added and _is_unknown(key, without):
                unknown.append(f"{key}={as_written(value)}{_like(key, without)}")
            continue
        switches = row.switches(key, config)
        is_spared = not row.always and (not value or any(place in values for place in switches))
        is_spared = is_spared or key in trained_with
        if is_spared or value == select(without, key, None):
            idle.append(key)
        else:
            because = ", ".join(f"{place}={as_written(at)}" for place, at in switches.items())
            remedy = row.give and f", or give {row.give.replace('{group}', key.rpartition('.')[0])}"
            why = f"no effect{because and f' with {because}'}; leave it out{remedy}"
            refused.setdefault(why, []).append(f"{key}={as_written(value)}")
    notes = []
    if idle:
        count = "1 key of your command changes" if len(idle) == 1 else f"{len(idle)} keys of your command change"
        notes.append(f"{count} nothing here: {', '.join(idle)} ({_PAGE})")
    if unknown:
        notes.append(f"{', '.join(unknown)}: no effect unless code of yours reads it; {_UNKNOWN}")
    return [f"{', '.join(keys)}: {why}" for why, keys in refused.items()], notes


def _is_unknown(key: str, without: DictConfig) -> bool:
    """Whether an added key is new to the configuration, below no group that hands on what it holds, and a name of it
    that is new is in no code."""
    is_new = select(without, key, _ABSENT) is _ABSENT and not HANDED_ON.search(key)
    return is_new and not _names_in_code().issuperset(_new_names(key, without))


def _new_names(key: str, without: DictConfig) -> list[str]:
    """The last names of a key, from the first one on that the configuration does not have."""
    names = key.split(".")
    there = next(n for n in range(len(names), -1, -1) if n == 0 or has_key(without, ".".join(names[:n])))
    return names[there:]


def _like(key: str, without: DictConfig) -> str:
    """A suggestion for an added key that is a mistyped one of its group."""
    new = _new_names(key, without)
    group = ".".join(key.split(".")[: -len(new)])
    beside = select(without, group, None) if group else without
    return did_you_mean(new[0], map(str, beside)) if new and OmegaConf.is_dict(beside) else ""


@functools.cache
def _names_in_code() -> frozenset[str]:
    """What verl's code and that of the recipes reads: attributes, texts, fields; no variables and no comments."""
    store = find_spec("transfer_queue")  # which gets its group as it is; its defaults are in a file
    stores = [Path(folder) for folder in (store and store.submodule_search_locations) or ()]
    folders = (verl_config_dir().parents[1], CONF_DIR.parents[1], *stores)
    # old_keys.py names keys that nothing reads.
    files = (file for folder in folders for file in folder.rglob("*.py") if file.name != "old_keys.py")
    defaults = (folder / "config.yaml" for folder in stores)
    names = re.compile(r"""[."']([\w-]+)|^ +(\w+) ?:""", re.MULTILINE)
    read = (names.findall(re.sub(r"#.*", "", file.read_text(encoding="utf-8"))) for file in (*files, *defaults))
    return frozenset(name for of_file in read for either in of_file for name in either if name)
