"""Loaded by verl in every process that imports it, through the ``verl.plugins`` entry point.

Selects nothing and starts nothing: it makes the CPU platform known where ``VERL_PLATFORM=cpu`` (never on a GPU run),
and has a driver whose configuration is of a run in the runner's care prepare Ray's workers. In processes of a run of
the runner's, and in no others, sockets are where no other user can take their place, and stacks are written when asked.
"""

from __future__ import annotations

import os

from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.faults.stacks import write_when_asked
from recipe.runner.ray_worker import have_workers_begin
from recipe.runner.verl_patches.shown import log_as_written, print_as_written
from recipe.runner.verl_patches.sockets import move_weights_to_the_private_folder
from recipe.runner.verl_patches.stores import listen_at_the_address
from recipe.runner.when_imported import WhenImported

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    import recipe.runner.cpu.platform  # noqa: F401  (registers the platform)
    from recipe.runner.cpu.patches import merge_duplicate_process_group_backend, report_vllm_version

    merge_duplicate_process_group_backend()
    report_vllm_version()


WhenImported("verl.trainer.constants_ppo", have_workers_begin)
if RUN_ID_VARIABLE in os.environ:
    WhenImported("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", move_weights_to_the_private_folder)
    WhenImported("torch.distributed.rendezvous", listen_at_the_address)
    WhenImported("verl.trainer.main_ppo", print_as_written)
    WhenImported("verl.trainer.ppo.v1.trainer_base", log_as_written)
    write_when_asked()
