"""Loaded by verl in every process that imports it, through the ``verl.plugins`` entry point.

It registers the losses at once, the trainers where verl asks for one of them, and has verl's driver check and prepare a
command with a loss or a trainer of ours before it starts Ray. verl logs a plugin's import error at DEBUG only; the
workers of this recipe import :mod:`fspo.verl` themselves, and so show it.
"""

# Before the losses, whatever the order of verl's entry points: they import verl's, which query the platform.
import recipe.runner.plugin  # noqa: F401

# isort: split
import os
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from recipe.fspo import TRAINER_MODES
from recipe.runner import SUPPORTED_VERL
from recipe.runner.faults.preemption import remove_old_request
from recipe.runner.faults.processes import RUN_ID_VARIABLE, own_run_id
from recipe.runner.when_imported import WhenImported


def find_trainers(v1: Any) -> None:
    """Import the trainers where verl's package ``v1`` is asked for one of them, not wherever verl's are imported."""
    # upstream: verl.trainer.main_ppo "from verl.trainer.ppo.v1 import get_trainer_cls"
    # upstream: verl.trainer.ppo.v1.trainer_base:get_trainer_cls(name)
    get = v1.get_trainer_cls

    @wraps(get)
    def get_trainer_cls(name: str) -> Any:
        if name in TRAINER_MODES:
            import recipe.fspo.trainer  # noqa: F401
        return get(name)

    v1.get_trainer_cls = get_trainer_cls


def prepare_driver(constants: Any) -> None:
    """Check, complete and prepare a run where verl's driver asks for the environment of Ray's workers.

    Without the check a run would fail in its first mini-batch, when models have been loaded and a batch has been
    generated. In another release than the supported one the checks know too little: a loss of ours goes unchecked
    there, and a trainer of ours is refused. ``constants`` is verl's module ``verl.trainer.constants_ppo``.
    """
    # upstream: verl.trainer.constants_ppo:get_ppo_ray_runtime_env(config)
    environment, is_verls = constants.get_ppo_ray_runtime_env, RUN_ID_VARIABLE not in os.environ

    @wraps(environment)
    def prepared(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        mode = OmegaConf.select(config, "trainer.v1.trainer_mode") if OmegaConf.is_config(config) else None
        if (installed := version("verl")) == SUPPORTED_VERL:
            if config is not None and "actor_rollout_ref" in config and is_verls:
                check(config)
        elif mode in TRAINER_MODES:
            raise ValueError(
                f"trainer.v1.trainer_mode={mode} needs verl {SUPPORTED_VERL}, and {installed} is installed: install "
                "the former, or take a trainer of verl's (docs/verl.md, the loss alone)"
            )
        if mode in TRAINER_MODES:
            folder = Path(config.trainer.default_local_dir)
            folder.mkdir(parents=True, exist_ok=True)
            if RUN_ID_VARIABLE not in os.environ:  # verl's own command: its processes become those of a run
                remove_old_request(folder)
                own_run_id()
        runtime_env = environment(config, *args, **kwargs)
        if os.environ.get("FSPO_AUDIT") and is_verls:
            from recipe.fspo.audit import announced

            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **announced(config)}
        return runtime_env

    constants.get_ppo_ray_runtime_env = prepared


def check(config: Any) -> None:
    """Refuse or complete a command of verl's own, by a ValueError with all problems; main checks more by itself."""
    from recipe.fspo import checks
    from recipe.fspo.config import complete, is_by_sequence, is_ours

    if not (is_ours(config) or is_by_sequence(config)):
        return
    if problems := checks.problems(config):
        raise ValueError("\n".join(problems))
    notes = [*checks.notes(config), *(complete(config) if is_ours(config) else ())]  # the former of what was given
    print(*(f"note: {note}\n" for note in notes), sep="", end="", flush=True)


def audit(workers: Any) -> None:
    """Audit what verl's module ``engine_workers`` trains here; an error ends the audit and not the run."""
    try:
        from recipe.fspo.audit import AuditedWorkers

        AuditedWorkers().wrap(workers.TrainingWorker)
    except Exception as error:
        print(f"FSPO_AUDIT: {type(error).__name__}: {error}; this process audits nothing", flush=True)


# Before the losses: their import fails where a module of this recipe has imported verl and is half-loaded.
WhenImported("verl.trainer.ppo.v1", find_trainers)
WhenImported("verl.trainer.constants_ppo", prepare_driver)
# A run of this recipe's trainers keeps a table in its own folder.
if RUN_ID_VARIABLE not in os.environ and os.environ.get("FSPO_AUDIT"):
    os.environ["FSPO_AUDIT"] = str(Path(os.environ["FSPO_AUDIT"]).absolute())  # workers stand in other folders
    WhenImported("verl.workers.engine_workers", audit)

# isort: split
import fspo.verl  # noqa: E402, F401
