"""What plain verl does with this recipe when a process asks for it: find a trainer, check a configuration before Ray.

Without the check a run would fail in its first mini-batch, when models have been loaded and a batch has been generated.
"""

from __future__ import annotations

from functools import wraps
from importlib.metadata import version
from typing import Any

from omegaconf import OmegaConf
from recipe.runner import SUPPORTED_VERL


def find_trainers(v1: Any) -> None:
    """Import the trainers where verl is asked for one of them, and not in every process that imports verl's.

    Args:
        v1: verl's package ``verl.trainer.ppo.v1``.
    """
    get = v1.get_trainer_cls

    @wraps(get)
    def get_trainer_cls(name: str) -> Any:
        from recipe.fspo.config import TRAINER_MODES

        if name in TRAINER_MODES:
            import recipe.fspo.trainer  # noqa: F401
        return get(name)

    v1.get_trainer_cls = get_trainer_cls


def check_before_ray(constants: Any) -> None:
    """Check and complete the configuration where verl's driver asks for the environment of Ray's workers.

    In another release than the supported one the checks know too little: a loss of ours goes unchecked there, and a
    trainer of ours is refused.

    Args:
        constants: verl's module ``verl.trainer.constants_ppo``.
    """
    environment = constants.get_ppo_ray_runtime_env

    @wraps(environment)
    def checked(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        mode = OmegaConf.select(config, "trainer.v1.trainer_mode") if OmegaConf.is_config(config) else None
        if (installed := version("verl")) != SUPPORTED_VERL:
            from recipe.fspo.config import TRAINER_MODES

            if mode in TRAINER_MODES:
                raise ValueError(
                    f"trainer.v1.trainer_mode={mode} needs verl {SUPPORTED_VERL}, and {installed} is installed: "
                    "install the former, or take a trainer of verl's (docs/verl.md, the loss alone)"
                )
        elif config is not None and "actor_rollout_ref" in config:
            from recipe.fspo.rules import audit_problems, complete_plain, plain_notes, plain_problems

            if problems := [*plain_problems(config), *audit_problems(config)]:
                raise ValueError("\n".join(problems))
            notes = list(plain_notes(config))  # of the configuration as it was given
            for note in filter(None, [*notes, complete_plain(config)]):
                print(f"note: {note}", flush=True)
        return environment(config, *args, **kwargs)

    constants.get_ppo_ray_runtime_env = checked
