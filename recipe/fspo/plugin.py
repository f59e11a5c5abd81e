"""Loaded by verl in every process that imports it, through the ``verl.plugins`` entry point: registers the losses.

verl logs a plugin's import error at DEBUG only; the workers of this recipe import :mod:`recipe.fspo.policy_loss`
themselves, and so show it.
"""

# Before the losses, whatever the order of verl's entry points: they import verl's, which query the platform.
import recipe.runner.plugin

# isort: split
import recipe.fspo.policy_loss
import recipe.fspo.relatives  # noqa: F401
