"""Plain verl's driver checks its configuration before Ray.

Otherwise a run would fail in its first mini-batch, when models have been loaded and a batch has been generated.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


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
