"""Nothing of verl, Ray, torch or TransferQueue is changed where no run of ours is.

What the modules do is tested in test_packs.py, test_frames.py and test_sockets.py, that they are needed in
test_upstream.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Names of what belongs to verl or Ray and is ours, in a process that has imported what a driver and its workers do.
OURS = """
import sys, types
import verl, ray.runtime_context, verl.trainer.main_ppo, verl.workers.engine_workers
import verl.trainer.ppo.metric_utils, verl.trainer.ppo.rollout_corr_helper, verl.utils.tracking
import torch.distributed.rendezvous, transfer_queue, verl.workers.rollout.vllm_rollout.bucketed_weight_transfer

def code(value):
    value = value.fget if isinstance(value, property) else value
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return value.__globals__.get("__name__", "") if isinstance(value, types.FunctionType) else ""

ours = set()
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] in ("verl", "ray", "torch", "transfer_queue") and type(module) is types.ModuleType:
        owners = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
        for owner in (module, *owners):
            members = [member for member, value in vars(owner).items() if code(value).startswith(("recipe.", "fspo."))]
            ours |= {f"{name}:{getattr(owner, '__qualname__', '')}.{member}" for member in members}
print(*sorted(ours), sep="\\n")

# What verl's driver asks for its workers, in a run and beside one.
import os
from omegaconf import OmegaConf
from recipe.runner.ray_worker import HOOK
asked = verl.trainer.main_ppo.get_ppo_ray_runtime_env(OmegaConf.create({}))
assert (HOOK in asked) == ("FSPO_RUN_ID" in os.environ)
"""


def ours(**environment: str) -> set[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("FSPO_RUN_ID", "FSPO_AUDIT")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OURS],
        env=inherited | {"VERL_PLATFORM": "cpu"} | environment,
        cwd=Path.home(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = ("verl.", "ray.", "transfer_queue.", "torch.distributed.rendezvous:")
    return {line for line in done.stdout.splitlines() if line.startswith(theirs)}


@pytest.mark.slow  # two fresh processes that import verl's trainer
def test_nothing_is_changed_in_a_process_without_a_run_of_ours() -> None:
    """But the checks of plain verl's driver, which ask for :data:`recipe.runner.ray_worker.HOOK` in a run only."""
    plain = {name.rpartition(":")[2] for name in ours()}
    assert plain == {".get_ppo_ray_runtime_env", ".version"}  # the second is vLLM's, on CPUs
    in_a_run = {name.rpartition(":")[2] for name in ours(FSPO_RUN_ID="1-test")}
    assert {"BucketedWeightSender.__init__", "BucketedWeightReceiver.__init__", ".TCPStore"} <= in_a_run
    assert ".compute_rollout_rejection_mask" not in in_a_run, "the trainer's and the workers' modules add the rule"
