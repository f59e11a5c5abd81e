"""What a fresh process imports, and what it must not: light commands, verl with our plugin, a run on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: In this order, because each part may import more than the one before. verl above all: it fixes its platform while it
#: is imported, and a command decides about the platform first.
LIGHT = """
import contextlib, importlib, io, pkgutil, sys

def absent(*packages):
    found = set(packages) & {name.split(".")[0] for name in sys.modules}
    assert not found, found

def modules_of(package, *without):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.startswith(without) and not module.name.endswith("__main__"):
            yield module.name

import recipe.fspo.reward
recipe.fspo.reward.compute_score("aime24", r"\\boxed{1}", "1")
absent("math_verify", "sympy", "torch", "verl", "ray", "transformers", "datasets")

import fspo.calibration, fspo.diagnostics, fspo.losses, fspo.records
absent("scipy")

for name in modules_of("fspo", "fspo.report"):
    importlib.import_module(name)
absent("verl", "ray", "vllm", "hydra", "omegaconf", "transformers", "matplotlib")
for name in modules_of("fspo.report"):
    importlib.import_module(name)
absent("verl", "ray", "vllm", "hydra", "omegaconf", "transformers")

import recipe.fspo.compare.__main__, recipe.fspo.main, recipe.runner.plan.__main__
with contextlib.redirect_stdout(io.StringIO()):
    assert recipe.runner.plan.__main__.main(["experiment=qwen3_8b", "json=true"]) == 0
absent("verl", "ray", "vllm", "transformers")
"""


VERL_ON_CPUS = """
import sys, verl
from verl.plugin.platform import PlatformRegistry
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from fspo.losses import ALGORITHMS
assert set(ALGORITHMS) <= set(POLICY_LOSS_REGISTRY), sorted(POLICY_LOSS_REGISTRY)
assert "cpu" in PlatformRegistry.registered_names()
assert "vllm" not in sys.modules, "the plugin must not make every process load vLLM"
"""

VERL_ON_GPUS = """
import sys, verl, recipe.fspo.worker
from verl.plugin.platform import PlatformRegistry
assert "cpu" not in PlatformRegistry.registered_names()
found = [name for name in sys.modules if name.startswith("recipe.runner.cpu")]
assert not found, found
"""

SOCKETS_BY_RUN = """
import inspect, sys, types, ray, verl
import verl.workers.rollout.vllm_rollout.vllm_async_server as server
from ray.runtime_context import RuntimeContext
from verl.workers.rollout.vllm_rollout import ServerAdapter
# Both ends of the socket still ask Ray for its job, and nothing else of verl does.
assert "job_id = ray.get_runtime_context().get_job_id()" in inspect.getsource(ServerAdapter.__init__)
assert 'os.environ["VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()' in inspect.getsource(server)
ray.is_initialized = lambda: True
job = types.SimpleNamespace(current_job_id=types.SimpleNamespace(hex=lambda: "01000000"))
assert RuntimeContext(job).get_job_id() == "01000000{suffix}", RuntimeContext(job).get_job_id()
"""

#: What is expected, code and environment.
FRESH = [
    pytest.param(LIGHT, {}, id="light modules import nothing heavy"),
    pytest.param(
        VERL_ON_CPUS, {"VERL_PLATFORM": "cpu"}, id="verl finds the losses and the platform", marks=pytest.mark.slow
    ),
    pytest.param(
        SOCKETS_BY_RUN.format(suffix="-abc"),
        {"VERL_PLATFORM": "cpu", "FSPO_RUN_ID": "abc"},
        id="a run has sockets of its own",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        SOCKETS_BY_RUN.format(suffix=""),
        {"VERL_PLATFORM": "cpu"},
        id="plain verl is left alone",
        marks=pytest.mark.slow,
    ),
    pytest.param(VERL_ON_GPUS, {}, id="a GPU run imports nothing of CPUs", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("code", "environment"), FRESH)
def test_in_a_fresh_process(code: str, environment: dict[str, str]) -> None:
    set_by_tests = ("VERL_PLATFORM", "FSPO_RUN_ID")
    inherited = {name: value for name, value in os.environ.items() if name not in set_by_tests}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path.home(),  # outside the checkout
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
