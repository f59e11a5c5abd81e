"""What every Ray worker of a run does first, before it imports anything of verl (``worker_process_setup_hook``).

Not all of them import verl, whose plugins come with it: TransferQueue's controller and storage do not.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any, Final

from recipe.runner.faults import node
from recipe.runner.faults.preemption import JOB_VARIABLES, keep_blocked
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.verl_patches.frames import sign_messages

#: Ray's setting, which it calls experimental, and its value, a name that each worker imports.
# upstream: ray._private.workers.default_worker "load_and_execute_setup_hook("
HOOK: Final = "worker_process_setup_hook"
BEGIN: Final = "recipe.runner.ray_worker.begin"


def begin() -> None:
    """Keep signals blocked that are, kernels in the user's private folder, and sign TransferQueue's messages.

    Raises NotPrivateError if the folder is not private.
    """
    keep_blocked()
    if node.PRIVATE_VARIABLE not in os.environ:  # a Ray that the run did not start
        private = node.private_folder(*node.parent_folder())
        os.environ |= {**node.cache_environment(private), node.PRIVATE_VARIABLE: str(private)}
    sign_messages()


def have_workers_begin(constants: Any) -> None:
    """Have verl's ``constants_ppo`` ask Ray for :func:`begin` in a run, which has an id, and hand on its variables.

    A Ray that the run did not start inherits nothing.
    """
    # upstream: verl.trainer.constants_ppo:get_ppo_ray_runtime_env(config)
    environment = constants.get_ppo_ray_runtime_env

    @wraps(environment)
    def with_hook(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        runtime_env = environment(config, *args, **kwargs)
        if run_id := os.environ.get(RUN_ID_VARIABLE):
            own = {RUN_ID_VARIABLE: run_id, **{name: os.environ.get(name, "") for name in JOB_VARIABLES}}
            runtime_env = {**runtime_env, HOOK: BEGIN, "env_vars": {**runtime_env.get("env_vars", {}), **own}}
        return runtime_env

    constants.get_ppo_ray_runtime_env = with_hook
