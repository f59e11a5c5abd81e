"""Loaded by verl in every process that imports it, through the ``verl.plugins`` entry point.

Selects nothing and starts nothing: it makes the CPU platform known where ``VERL_PLATFORM=cpu`` (never on a GPU run)
and adds the sequence-level losses to verl's registry. verl logs a plugin's import error at DEBUG only; the workers of
this recipe import :mod:`recipe.fspo.policy_loss` themselves, and so show it.
"""

from __future__ import annotations

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    import recipe.fspo.cpu.platform  # registers the platform
    from recipe.fspo.cpu.patches import merge_duplicate_process_group_backend, report_vllm_version

    merge_duplicate_process_group_backend()
    report_vllm_version()

# After the platform, which their imports query: both register losses.
import recipe.fspo.policy_loss
import recipe.fspo.relatives  # noqa: F401
