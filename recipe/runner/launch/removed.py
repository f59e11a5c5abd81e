"""Settings and algorithms of earlier versions, with what to use instead.

A command that names one is refused with the sentence of its row. A run folder of an earlier version still has them: a
renamed one is read under its new name, a removed one is left out with one note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: Key, or ``GROUP=OPTION``, and what to use instead. A key stands for all that lies below it, too.
REMOVED: Final[dict[str, str]] = {
    "fspo.offline_task.name": "leave it out for remainders; sorted words are experiment=demo_words",
    "algo=fspo_adaptive": "use algo=fspo_quantile, whose acceptance meets its target without Gaussian tails",
    "fspo.attributes": "use fspo.record_sequences=true, which keeps S, L and A of every sequence",
    "actor_rollout_ref.actor.policy_loss.dual_clip": "use clip_high and s_max; no run has needed a second clip",
    "actor_rollout_ref.actor.policy_loss.staleness": "bound the staleness with trainer.v1.sampler (docs/async.md)",
    "fspo.samples": "use trainer.rollout_data_dir and trainer.validation_data_dir, of which the report shows some",
}

_POLICY_LOSS: Final = "actor_rollout_ref.actor.policy_loss"
#: What verl builds for a loss of fspo.losses.
LIBRARY_LOSS: Final = "recipe.fspo.config.SequencePolicyLossConfig"

#: Modules that have moved; a configuration names some of recipe.fspo.cpu.
_MOVED: Final = re.compile(r"\brecipe\.fspo\.(?=(?:launch|checkpoints|faults|cpu|plan|rehearse)\b)")

#: Key or group of an earlier version, and its new name; the values are the same.
RENAMED: Final[dict[str, str]] = {"grad_scale": "match_scale", "fspo.grad_scale": "fspo.match_scale"}


def remedy(key: str, value: object = None) -> str | None:
    """One sentence on a key, or a value of a group, that an earlier version had; None if there was no such."""
    if key in RENAMED:
        return f"{key} is now called {RENAMED[key]}: give {RENAMED[key]}={value}"
    for row in (f"{key}={value}", *_with_parents(key)):
        if row in REMOVED:
            return f"{row} was removed: {REMOVED[row]}"
    return None


def is_removed(key: str) -> bool:
    """Whether the key, or one that it lies below, was removed."""
    return any(row in REMOVED for row in _with_parents(key))


def current(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A run's configuration as this version would have written it.

    Args:
        values: Nested, as ``config.yaml`` of a run folder has them. A loss of the user's may have a field with the name
            of one that was removed here; it is kept.

    Returns:
        The configuration with renamed keys under their new names and without removed ones; and ``KEY=VALUE`` of what
        was removed.
    """
    left_out: list[str] = []
    loss = (_parent(values, f"{_POLICY_LOSS}._target_") or {}).get("_target_")
    rows = {row for row in REMOVED if loss == LIBRARY_LOSS or not row.startswith(_POLICY_LOSS)}

    def below(parent: Mapping[str, Any], place: str) -> dict[str, Any]:
        kept = {}
        for name, value in parent.items():
            if f"{place}{name}" in rows:
                left_out.append(f"{place}{name}={value}")
            else:
                kept[name] = below(value, f"{place}{name}.") if isinstance(value, Mapping) else _moved(value)
        return kept

    result = below(values, "")
    for old, new in RENAMED.items():
        parent = _parent(result, old)
        name = old.rpartition(".")[2]
        if parent is not None and name in parent:
            value = parent.pop(name)
            *groups, leaf = new.split(".")
            place = result
            for group in groups:
                place = place.setdefault(group, {})
            place.setdefault(leaf, value)
    return result, left_out


def _moved(value: object) -> object:
    """A module that a value names, where it is now."""
    return _MOVED.sub("recipe.runner.", value) if isinstance(value, str) else value


def _with_parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _parent(values: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """The dictionary that a key lies in; None if it is not there."""
    place: Any = values
    for name in key.split(".")[:-1]:
        place = place.get(name) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else None
