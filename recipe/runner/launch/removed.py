"""Settings of a job's earlier versions, with what to use instead.

A command that names one is refused with the sentence of its row. A run folder of an earlier version still has them: a
renamed one is read under its new name, a removed one is left out with one note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EarlierNames:
    """What a job has removed or renamed.

    Attributes:
        removed: Key, or ``GROUP=OPTION``, and what to use instead. A key stands for all that lies below it, too.
        renamed: Key or group, and its new name; the values are the same.
        modules: Pattern of the modules that have moved and that a configuration may name, and what replaces it.
        settings_class: Class (``_target_``) whose fields were removed; a group that names another keeps its fields.
    """

    removed: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, str] | None = None
    settings_class: str = ""

    def remedy(self, key: str, value: object = None) -> str | None:
        """One sentence on a key, or a value of a group, of an earlier version; None if there was no such."""
        for row in (f"{key}={value}", *_with_parents(key)):
            if row in self.removed:
                return f"{row} was removed: {self.removed[row]}"
        new = self.new_name(key)
        return None if new == key else f"{key} is now called {new}: give {new}={value}"

    def new_name(self, key: str) -> str:
        """The key as it is called today."""
        for old in _with_parents(key):
            if old in self.renamed:
                return self.renamed[old] + key.removeprefix(old)
        return key

    def is_removed(self, key: str) -> bool:
        """Whether the key, or one that it lies below, was removed."""
        return any(row in self.removed for row in _with_parents(key))

    def current(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """A run's configuration, nested as in ``config.yaml``, as this version would have written it.

        Returns:
            The configuration with renamed keys under their new names and without removed ones; and ``KEY=VALUE`` of
            what was removed.
        """
        left_out: list[str] = []

        def below(parent: Mapping[str, Any], place: str) -> dict[str, Any]:
            kept, ours = {}, parent.get("_target_") in (None, self.settings_class)
            for name, value in parent.items():
                if ours and f"{place}{name}" in self.removed:
                    left_out.append(f"{place}{name}={value}")
                else:
                    kept[name] = below(value, f"{place}{name}.") if isinstance(value, Mapping) else self._moved(value)
            return kept

        result = below(values, "")
        for old, new in self.renamed.items():
            parent, name = _parent(result, old, make=False), old.rpartition(".")[2]
            if name in parent:
                _parent(result, new, make=True).setdefault(new.rpartition(".")[2], parent.pop(name))
        return result, left_out

    def _moved(self, value: object) -> object:
        """A module that a value names, where it is now."""
        return re.sub(*self.modules, value) if self.modules is not None and isinstance(value, str) else value


def _with_parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _parent(values: dict[str, Any], key: str, *, make: bool) -> dict[str, Any]:
    """The dictionary that a key lies in; an empty one if it is not there, or made there."""
    place: Any = values
    for name in key.split(".")[:-1]:
        place = place.setdefault(name, {}) if make else place.get(name, {})
        if not isinstance(place, dict):
            return {}
    return place  # type: ignore[no-any-return]
