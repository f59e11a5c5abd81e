"""Calls a function once a module has been imported; with it the plugin checks plain verl's configuration before Ray.

Otherwise the run would fail in its first mini-batch, when models have been loaded and a batch has been generated.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from typing import Any


class WhenImported(MetaPathFinder):
    """Calls ``then(module)`` once a module has been imported, at once if it has been already; imports nothing itself.

    verl.trainer.constants_ppo asks CUDA for the device as it is imported. Only a driver does that; in a worker it would
    start CUDA before verl has chosen the device.
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


def check_before_ray(constants: Any) -> None:
    """Check the configuration where verl's driver asks for the environment of Ray's workers.

    Args:
        constants: verl's module ``verl.trainer.constants_ppo``.
    """
    environment = constants.get_ppo_ray_runtime_env

    @wraps(environment)
    def checked(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if config is not None and "actor_rollout_ref" in config:
            from recipe.fspo.config import plain_notes, plain_problems

            if problems := list(plain_problems(config)):
                raise ValueError("\n".join(problems))
            for note in plain_notes(config):
                print(f"note: {note}", flush=True)
        return environment(config, *args, **kwargs)

    constants.get_ppo_ray_runtime_env = checked
