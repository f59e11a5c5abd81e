"""A reward function of the user's own: load it as verl does, and say what is wrong with it, its call or its result."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import itertools
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

#: How verl passes the row and the response; every one of them, by keyword.
ARGUMENTS: Final = ("data_source", "solution_str", "ground_truth", "extra_info")
_PACKAGE, _FILE = "pkg://", "file://"
#: Packages whose frames stand between a reward worker and the user's function.
_CALLERS: Final = ("importlib", "concurrent", "asyncio", "threading", "fspo", "recipe", "verl", "ray", "__main__")


class BadReward(ValueError):
    """A reward function, or what it returned, cannot be used; the message says why and what to change."""


def load(path: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of ``pkg://package.module``, or of a Python file.

    Raises:
        BadReward: there is no such file, module or function, or the module itself fails; the message then has the
            traceback of the user's lines.
    """
    return _function(_module(path), name)


def _module(path: str) -> ModuleType:
    file = Path(path.removeprefix(_FILE))
    if not path.startswith(_PACKAGE) and (file.suffix != ".py" or not file.is_file()):
        wrong = "is no Python file (.py)" if file.is_file() else "is a folder" if file.is_dir() else "does not exist"
        raise BadReward(f"{file} {wrong}: correct the path, or give pkg://package.module")
    try:
        if path.startswith(_PACKAGE):
            return importlib.import_module(path.removeprefix(_PACKAGE).replace("/", "."))
        spec = importlib.util.spec_from_file_location(f"reward_of_the_user_{file.stem}", file)
        assert spec is not None and spec.loader is not None  # a .py file has them
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        way = "\nInstall it on every node, or start the command in the folder that holds it"
        way = way if isinstance(error, ModuleNotFoundError) else ""
        raise BadReward(f"importing it raised {describe(error)}{way}") from error


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        have = sorted(key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_")
        raise BadReward(f"it has no function {name!r}; it has {', '.join(have) or 'none'}")
    return function


def describe(error: BaseException) -> str:
    """Name, text and traceback of an exception, from the first frame on that is not part of how it was called."""

    def calls(step: tuple[FrameType, int]) -> bool:
        return str(step[0].f_globals.get("__name__")).partition(".")[0] in _CALLERS

    own = itertools.dropwhile(calls, traceback.walk_tb(error.__traceback__))
    lines = "".join(traceback.StackSummary.extract(own).format())
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}\n{lines}".rstrip()


def call_problem(function: Callable[..., Any], keywords: Iterable[str] = ()) -> str | None:
    """Why verl could not call a function with :data:`ARGUMENTS` and further ``keywords``; None if it can."""
    keywords = list(keywords)
    if taken := [keyword for keyword in keywords if keyword in ARGUMENTS]:
        return f"reward_kwargs would replace {', '.join(taken)} of every row: take other names"
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys([*ARGUMENTS, *keywords]))
    except TypeError as error:
        if inspect.isclass(function):
            name = function.__name__
            return f"it is a class, and verl calls it for each response: give an object, as reward = {name}() ({error})"
        return (
            f"verl calls it by keyword with {', '.join([*ARGUMENTS, *keywords])}, and it takes {signature}: {error}. "
            f"Write def {getattr(function, '__name__', 'compute_score')}({', '.join(ARGUMENTS)}=None, **kwargs)"
        )
    return None


def call(function: Callable[..., Any], *values: Any, settings: Mapping[str, Any] | None = None) -> Any:
    """What a function returns for the values of :data:`ARGUMENTS`, called as a run calls it: in a thread.

    Raises:
        BadReward: if it raises anything; the message ends in the traceback of the user's lines.
    """

    def run() -> None:
        try:
            returned = function(**dict(zip(ARGUMENTS, values, strict=True)), **(settings or {}))
            outcome.set_result(asyncio.run(returned) if inspect.iscoroutinefunction(function) else returned)
        except BaseException as error:
            outcome.set_exception(error)

    outcome: Future[Any] = Future()
    threading.Thread(target=run, daemon=True).start()  # a daemon: Ctrl-C does not wait for a call without an end
    try:
        return outcome.result()
    except (Exception, SystemExit) as error:
        raise BadReward(f"it raised {describe(error)}") from error


def result_problem(result: Any, kinds: dict[str, str] | None = None) -> str | None:
    """Why what a reward function returned cannot be used; None for a finite number, or a dict with one as ``score``.

    The further values of a dict are metrics of validation, which takes means of them: they are numbers, lists of
    numbers, text or None, and each key has one kind and one length.

    Args:
        result: Of one call.
        kinds: The kind of each key in the calls before; this result's are added.
    """
    if inspect.isawaitable(result):
        return "it returned a coroutine: declare it with `async def`, so that verl awaits it"
    if isinstance(result, Mapping) and "score" not in result:
        keys = ", ".join(map(str, result)) or "none"
        return f"it returned a dict without 'score' (its keys: {keys}): call the reward's key score"
    values = result if isinstance(result, Mapping) else {"score": result}
    for key in ("score", "acc"):
        if key in values and not _is_finite(values[key]):
            named = f"{key}=" if isinstance(result, Mapping) else "the text " if isinstance(result, str) else ""
            what = f"{values[key]!r} ({type(values[key]).__name__})"
            return f"it returned {named}{what}, which is not a finite number: return one, or a dict with one as score"
    kinds = {} if kinds is None else kinds
    for key, value in values.items():
        if value is None:
            continue
        if (kind := _kind(value)) is None:
            return (
                f"it returned {key}={value!r} ({type(value).__name__}), of which validation cannot take a mean: return "
                "numbers, lists of numbers, or text, one value under each key"
            )
        if kind != (before := kinds.setdefault(key, kind)):
            return f"it returned {key}={value!r}, {kind}, and before {before}: return one kind under a key"
    return None


def _kind(value: Any) -> str | None:
    """Text, a number, or how many numbers; None for anything else."""
    import numpy as np

    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "a number"
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # a ragged list; a tensor on a GPU
        return None
    if array.dtype.kind not in "biuf" or not array.size:
        return None
    return f"numbers of shape {array.shape}" if array.shape else "a number"


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
