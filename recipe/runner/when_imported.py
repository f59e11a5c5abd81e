"""Calls a function once a module has been imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any


class WhenImported(MetaPathFinder):
    """Calls ``then(module)`` once a module has been imported, at once if it has been already; imports nothing itself.

    What is imported too early costs memory where nobody needs it, and may start CUDA before the device is chosen.
    """

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then
        if name in sys.modules:
            then(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_call(module: Any) -> None:
            run(module)
            self._then(module)

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec
