"""Each departure of recipe.runner.verl_patches is still needed, and nothing is changed where no run of ours is.

A failure of ``test_verl_still_...`` is good news: verl has changed, and the module can go. What the modules do is
tested in test_packs.py, test_server_slots.py, test_frames.py, test_sockets.py and test_stores.py.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.runner import verl_patches

#: By module: the function of verl that it stands in for, and what is wrong in it, as its source has it.
WRONG = {
    "packs": (
        "verl.workers.engine_workers:TrainingWorker.infer_batch",
        "output = self.engine.infer_batch(data, loss_function=loss_function)",  # the whole batch at once
    ),
    "server_slots": ("verl.workers.rollout.replica:RolloutReplica.max_concurrency", "max(1000,"),
    "shown": ("verl.trainer.main_ppo:TaskRunnerV1.run", "pprint(OmegaConf.to_container(config, resolve=True))"),
    "frames": ("transfer_queue.utils.zmq_utils:ZMQMessage.deserialize", "result = decode(frames)"),  # at once
    "sockets": (
        "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.__init__",
        'self.zmq_handle = f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-',
    ),
    "stores": (
        "torch.distributed.rendezvous:_create_c10d_store",
        "timeout=timeout,\n            multi_tenant=True,\n            use_libuv=use_libuv,\n        )",  # no socket
    ),
    "weight_copies": ("verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu", ".detach().cpu()"),
}


@pytest.mark.parametrize("patch", sorted(path.stem for path in Path(verl_patches.__path__[0]).glob("[!_]*.py")))
def test_verl_still_needs_the_patch(patch: str) -> None:
    where, text = WRONG[patch]
    module, _, name = where.partition(":")
    spec = importlib.util.find_spec(module.partition(".")[0])
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        node = next(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == part
        )
    assert text in (ast.get_source_segment(source, node) or ""), f"{name} has changed: is {patch} still needed?"
    assert f"``{patch}``" in (verl_patches.__doc__ or "")


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

# What verl's driver asks for its workers, with a run's settings and without.
from omegaconf import OmegaConf
from recipe.runner.ray_worker import BEGIN, HOOK
of_workers = verl.trainer.main_ppo.get_ppo_ray_runtime_env
assert of_workers(OmegaConf.create({"run": {}}))[HOOK] == BEGIN
assert HOOK not in of_workers(OmegaConf.create({}))
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
