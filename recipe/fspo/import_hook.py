"""What plain verl does with this recipe when a process asks for it: find a trainer, check a configuration before Ray.

Without the check a run would fail in its first mini-batch, when models have been loaded and a batch has been generated.
"""

from __future__ import annotations

import os
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from recipe.runner import SUPPORTED_VERL
from recipe.runner.faults.processes import RUN_ID_VARIABLE

from fspo.files import folder_problem


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
            import recipe.fspo.trainer

            if RUN_ID_VARIABLE in os.environ:
                import recipe.fspo.in_runner.trainer  # noqa: F401
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
        if OmegaConf.is_config(config) and "actor_rollout_ref" in config and (wrong := _problems(config)):
            raise ValueError("\n".join(wrong))
        return environment(config, *args, **kwargs)

    constants.get_ppo_ray_runtime_env = checked


def _problems(config: DictConfig) -> list[str]:
    """What is wrong with a configuration of verl's own command; a right one is completed, in place."""
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if (installed := version("verl")) != SUPPORTED_VERL:
        needs = (
            f"trainer.v1.trainer_mode={mode} needs verl {SUPPORTED_VERL}, and {installed} is installed: install the "
            "former, or take a trainer of verl's (docs/verl.md, the loss alone)"
        )
        return [needs] if mode.startswith("fspo") else []
    from recipe.fspo import checks
    from recipe.fspo.config import complete, is_by_sequence, is_ours

    folder, ours = os.environ.get("FSPO_AUDIT"), is_ours(config)
    if not (ours or is_by_sequence(config)):
        problem = folder and folder_problem(Path(folder))
        return [f"FSPO_AUDIT={folder}: {problem}"] if problem else []
    if wrong := checks.problems(config):
        return wrong
    notes = checks.notes(config)  # of the configuration as it was given
    if ours:
        notes += complete(config)
    print(*(f"note: {note}\n" for note in notes), sep="", end="", flush=True)
    return []
