"""Reads files that somebody else may have written, or a disk damaged, within bounds.

Every file of a run folder is read through this module. It bounds what a file can do to its reader: its kind (a FIFO
would block, a device would never end), its size, its depth (whoever walks through it recurses), aliases in YAML (a few
lines of them unfold to more than the memory holds, or hold themselves), and its numbers (an integer of any size is
valid JSON). What a record has to hold is said by its fields, a :class:`Kind` for each name. The bounds are defined
here; what this project writes is far within them.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, TypeVar

T = TypeVar("T")

MAX_BYTES: Final = 64 * 2**20
"""Largest size of a file that is read whole, and of one line of any other file."""
_MAX_YAML_BYTES: Final = 2**21
"""A configuration that names thousands of data files is smaller; one of this size loads in seconds."""
_MAX_DEPTH: Final = 40
MAX_WHOLE: Final = 2**53
"""Whole numbers up to this one are exact as float64, too."""
MAX_NUMBER: Final = 1e100
"""The square of such a number, summed over any run, is still a float."""
_MAX_NAME: Final = 200
_MAX_PROBLEMS: Final = 1000
"""A file is not read further once so many of its lines are wrong."""


def is_below(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder once links are followed; a link that leads round in a circle stays where it is.

    ``Path.resolve`` raises for such a link, and opening it names it.
    """
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; OSError if it is anything else, such as a FIFO, a device or a folder."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """The text of a file of at most ``limit`` bytes; bytes that are no UTF-8 are replaced. OSError otherwise."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit} bytes", str(path))
    return content.decode("utf-8", errors="replace")


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError if it is none, nested too deep, or has an integer of over 4,300 digits."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
        if not level:
            break
    else:
        raise ValueError(_TOO_DEEP)
    if "\\ud" in text.lower():  # half a surrogate pair is no text that could be written
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


_TOO_DEEP: Final = f"nested more than {_MAX_DEPTH} deep"


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds, its scalars understood as OmegaConf does; interpolations stay text.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is no YAML, holds something else, is nested too deep or holds an alias.
    """
    import yaml  # type: ignore[import-untyped]

    text = read_text(path, _MAX_YAML_BYTES)
    loader = _yaml_loader()
    try:
        depth, wrong = 0, ""
        for event in yaml.parse(text, loader):  # first: loading recurses, and unfolds aliases
            if isinstance(event, yaml.ScalarEvent) and event.tag is None:
                continue
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                wrong = f"an alias, *{event.anchor}: write out what it stands for"
            elif getattr(event, "tag", None) is not None:
                wrong = f"a tag, {event.tag}: plain values only"
            elif depth > _MAX_DEPTH:
                wrong = _TOO_DEEP
            if wrong:
                raise ValueError(f"line {event.start_mark.line + 1}: {wrong}")
        value = yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(value, dict):
        raise ValueError(f"must hold a mapping, holds {reprlib.repr(value)}")
    return value


@functools.cache
def _yaml_loader() -> Any:
    """PyYAML's safe loader, in C where it is, with OmegaConf's scalars: 1e-6 is a number, a date is text."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(keys)) < len(keys):
                twice = next(key for key in keys if keys.count(key) > 1)
                raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} occurs twice", node.start_mark)
            return super().construct_mapping(node, deep)

    tag = "tag:yaml.org,2002:"
    Loader.add_implicit_resolver(f"{tag}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
    Loader.add_implicit_resolver(f"{tag}bool", re.compile(r"^(?:yes|no|true|false|on|off)$", re.I), list("yYnNtTfFoO"))
    whole = r"^[-+]?(?:0b[01_]+|0[0-7_]*|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"
    Loader.add_implicit_resolver(f"{tag}int", re.compile(whole), list("-+0123456789"))
    digits = r"[0-9]+(?:_[0-9]+)*"
    number = (
        rf"^(?:[-+]?{digits}(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.{digits}(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"
    )
    Loader.add_implicit_resolver(f"{tag}float", re.compile(number, re.I), list("-+0123456789."))
    return Loader


def read_lines(path: Path, problems: list[str], read: Callable[[dict[str, Any]], T]) -> Iterator[tuple[int, T]]:
    """Line number and content of every line of a JSON Lines file of which ``read`` makes one of its object.

    The others are named in ``problems``: lines that hold no object, and those for which ``read`` raises a KeyError,
    TypeError, ValueError or the like. After 1,000 of them the file is not read further.
    """
    wrong = number = 0
    try:
        with open_regular(path) as file:
            while (line := file.readline(MAX_BYTES + 1)) and wrong < _MAX_PROBLEMS:
                number += 1
                try:
                    if len(line) > MAX_BYTES:
                        wrong = _MAX_PROBLEMS
                        raise ValueError(f"a line of more than {MAX_BYTES} bytes")
                    if not line.strip():
                        continue
                    content = read(parse_object(line.decode("utf-8", errors="replace")))
                except (KeyError, TypeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
                    wrong += 1
                    what = f"needs {error}" if isinstance(error, KeyError) else str(error)
                    problems.append(f"{path}:{number}: {what or type(error).__name__}")
                else:
                    yield number, content
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
    if wrong >= _MAX_PROBLEMS:
        problems.append(f"{path}: what comes after line {number} is not read")


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object that a text holds; ValueError if it holds something else."""
    try:
        value = parse_json(text)
    except ValueError as error:
        cut = "; the last line is cut short" if text and not text.endswith("\n") else ""
        raise ValueError(f"not JSON ({getattr(error, 'msg', error)}){cut}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must hold a JSON object, holds {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: in words, to follow "must be", and a test whether a value is of it."""

    words: str
    holds: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(f"{self.words} or {other.words}", lambda value: self.holds(value) or other.holds(value))


def list_of(kind: Kind) -> Kind:
    """A list of any length whose entries are of this kind."""
    return Kind(f"a list, of {kind.words} each", lambda value: isinstance(value, list) and all(map(kind.holds, value)))


def rows_of(width: int) -> Kind:
    """A list of any length of rows of so many numbers."""
    return Kind(
        f"a list of rows of {width} finite numbers",
        lambda value: (
            isinstance(value, list)
            and all(isinstance(row, list) and len(row) == width and all(map(NUMBER.holds, row)) for row in value)
        ),
    )


def mapping_of(kind: Kind) -> Kind:
    """An object of any names whose values are of this kind."""
    holds = kind.holds
    return Kind(f"an object, of {kind.words} each", lambda v: isinstance(v, dict) and all(map(holds, v.values())))


def object_of(fields: Mapping[str, Kind], needed: tuple[str, ...] = ()) -> Kind:
    """An object with these fields, as far as it has them, and with those that are needed."""
    names = f" with {', '.join(needed)}" if needed else ""
    return Kind(
        f"an object{names}",
        lambda value: isinstance(value, dict) and set(needed) <= value.keys() and not wrong_fields(value, fields),
    )


NULL: Final = Kind("null", lambda value: value is None)
SWITCH: Final = Kind("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Kind("text", lambda value: isinstance(value, str))
NAME: Final = Kind(
    f"text of at most {_MAX_NAME} printable characters",
    lambda value: isinstance(value, str) and len(value) <= _MAX_NAME and value.isprintable(),
)
WHOLE: Final = Kind("a whole number", lambda value: type(value) is int and abs(value) <= MAX_WHOLE)
COUNT: Final = Kind("a whole number from 0 on", lambda value: type(value) is int and 0 <= value <= MAX_WHOLE)
NUMBER: Final = Kind(  # Python compares an integer of any size with a float; NaN compares as false
    "a finite number", lambda value: isinstance(value, int | float) and -MAX_NUMBER <= value <= MAX_NUMBER
)


def wrong_fields(record: Mapping[str, Any], fields: Mapping[str, Kind]) -> dict[str, str]:
    """What is wrong with the fields of a record, by name. A missing field is not wrong."""
    return {
        name: f"must be {kind.words}, is {reprlib.repr(record[name])}"
        for name, kind in fields.items()
        if name in record and not kind.holds(record[name])
    }


def check_fields(record: dict[str, Any], fields: Mapping[str, Kind], needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The record, if its fields are of their kinds and it has those that are needed.

    Raises:
        ValueError: Otherwise; the message names the field.
    """
    wrong = {name: f"must be {fields[name].words}, is missing" for name in needed if name not in record}
    if wrong := wrong | wrong_fields(record, fields):
        name, sentence = next(iter(wrong.items()))
        raise ValueError(f"{name} {sentence}")
    return record


def printable(text: str) -> str:
    """A text without characters that a terminal would obey: these are written as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
