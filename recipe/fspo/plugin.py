"""Loaded by verl in every process that imports it, through the ``verl.plugins`` entry point: registers the losses, and
the trainers where verl is asked for one.

verl logs a plugin's import error at DEBUG only; the workers of this recipe import :mod:`recipe.fspo.policy_loss`
themselves, and so show it.
"""

# Before the losses, whatever the order of verl's entry points: they import verl's, which query the platform.
import recipe.runner.plugin

# isort: split
import os

from recipe.fspo.import_hook import check_before_ray, find_trainers
from recipe.runner.faults.processes import RUN_ID_VARIABLE

from fspo.when_imported import WhenImported

# Before the losses: their import fails where a module of this recipe has imported verl and is half-loaded.
WhenImported("verl.trainer.ppo.v1", find_trainers)
# A run of this recipe checks more by itself, and keeps an audit's sums in its own folder. In any other process nothing
# of verl is changed, but that its driver checks a configuration with a loss or a trainer of ours before it starts Ray.
if RUN_ID_VARIABLE not in os.environ:
    WhenImported("verl.trainer.constants_ppo", check_before_ray)
    if os.environ.get("FSPO_AUDIT"):
        try:
            from recipe.fspo.audit import install

            install()
        except Exception as error:  # verl would say so at DEBUG only
            print(f"FSPO_AUDIT: {type(error).__name__}: {error}; this process audits nothing", flush=True)

# isort: split
import recipe.fspo.policy_loss  # noqa: E402, F401
