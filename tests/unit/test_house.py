"""What a fresh process imports, and in which thread it takes signals; who imports whom: promises/test_imports.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ON_CPUS = {"VERL_PLATFORM": "cpu"}
VERL_ON_CPUS = """
import sys, verl
from verl.plugin.platform import PlatformRegistry
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from fspo.losses import ALGORITHMS
assert set(ALGORITHMS) <= set(POLICY_LOSS_REGISTRY), sorted(POLICY_LOSS_REGISTRY)
assert "cpu" in PlatformRegistry.registered_names()
assert "vllm" not in sys.modules, "the plugin must not make every process load vLLM"

from recipe.fspo.main import composed as compose
from recipe.fspo.checks import problems
assert problems(compose()) == []
assert "verl.workers.engine" not in sys.modules, "the checks must not import every engine that is installed"

from verl.trainer.ppo.v1 import get_trainer_cls
assert "recipe.fspo.trainer" not in sys.modules, "every agent loop's process imports this package of verl's"
names = ("fspo", "fspo_colocate_async", "fspo_separate_async")
assert {get_trainer_cls(name).__module__ for name in names} == {"recipe.fspo.trainer"}
"""

VERL_ON_GPUS = """
import sys, verl, recipe.fspo.worker
from verl.plugin.platform import PlatformRegistry
assert "cpu" not in PlatformRegistry.registered_names()
present = [name for name in sys.modules if name.startswith("recipe.runner.cpu")]
assert not present, present
"""

#: With an audit, in a process that trains nothing.
AUDITED = """
import sys, verl
trains = "verl.workers.engine_workers" in sys.modules
assert not trains, "every reward and rollout worker would need the memory of a trainer"
from verl.workers.engine_workers import TrainingWorker
for method in (TrainingWorker.set_loss_fn, TrainingWorker.train_batch):
    assert method.__wrapped__.__module__ == method.__module__ and "recipe" in method.__code__.co_filename
"""

#: One thread takes the signals; Ray's handler, or the default one, would take them in a thread that has them unblocked.
SIGNALS = """
import contextlib, os, re, runpy, signal, sys
sys.argv[1:] = ["nothing=1"]
try:
    runpy.run_module("recipe.fspo.main", run_name="__main__")
except SystemExit:
    pass
masks = []
for task in os.listdir("/proc/self/task"):
    with contextlib.suppress(OSError):  # a thread that has ended in the meantime
        masks.append(open(f"/proc/self/task/{task}/status").read())
assert "numpy" in sys.modules and len(masks) > 1
blocked = [int(re.search(r"SigBlk:\\s*(\\w+)", mask)[1], 16) for mask in masks]
for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
    assert sum(not mask >> signum - 1 & 1 for mask in blocked) == 1, signum  # the one that waits for it
"""


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        pytest.param(VERL_ON_CPUS, ON_CPUS, id="verl has losses, platform, trainers", marks=pytest.mark.slow),
        pytest.param(
            AUDITED, ON_CPUS | {"FSPO_AUDIT": "audit"}, id="an audit waits for what it wraps", marks=pytest.mark.slow
        ),
        pytest.param(SIGNALS, {}, id="one thread takes the signals"),
        pytest.param(VERL_ON_GPUS, {}, id="a GPU run imports nothing of CPUs", marks=pytest.mark.slow),
    ],
)
def test_in_a_fresh_process(code: str, environment: dict[str, str], tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "FSPO_RUN_ID")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,  # outside the checkout
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
