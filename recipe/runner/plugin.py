"""Loaded by verl in every process that imports it, through the ``verl.plugins`` entry point.

Selects nothing and starts nothing: it makes the CPU platform known where ``VERL_PLATFORM=cpu`` (never on a GPU run). In
processes of a run of the runner's, and in no others, each Ray's sockets have names of their own, and stacks are written
when asked.
"""

from __future__ import annotations

import os

from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.faults.stacks import write_when_asked
from recipe.runner.verl_patches.sockets import name_sockets_by_ray

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    import recipe.runner.cpu.platform  # noqa: F401  (registers the platform)
    from recipe.runner.cpu.patches import merge_duplicate_process_group_backend, report_vllm_version

    merge_duplicate_process_group_backend()
    report_vllm_version()


if RUN_ID_VARIABLE in os.environ:
    name_sockets_by_ray()
    write_when_asked()
