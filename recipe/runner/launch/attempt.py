"""Code of verl's or the user's, tried in a process without workers: what it returns, or what it raises."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

#: The remedy for code that cannot be imported.
INSTALL: Final = "install its package on every node, or start the command in the folder that holds it"


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | SystemExit | None]:
    """What a call returns, and what it raises in place of that. It starts no Ray, and what it warns of is not shown."""
    try:
        with warnings.catch_warnings(), _without_ray():
            warnings.simplefilter("ignore")
            return call(), None
    except (Exception, SystemExit) as error:
        return None, error


@contextlib.contextmanager
def _without_ray() -> Iterator[None]:
    """Ray starts or joins a cluster when a function of it is called first. Within this such a call fails instead."""
    from ray._private import auto_init_hook

    before, auto_init_hook.enable_auto_connect = auto_init_hook.enable_auto_connect, False
    try:
        yield
    finally:
        auto_init_hook.enable_auto_connect = before


def in_words(error: BaseException) -> str:
    """Name and text of an exception, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
