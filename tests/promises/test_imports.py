"""Promise 29: imports go one way, and what a fresh process imports; there also which thread takes its signals."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise(29)
ROOT = Path(__file__).parents[2]
#: What fspo/ knows nothing of, but for the two modules that are for a trainer.
TRAINERS = {"verl", "ray", "vllm", "hydra", "omegaconf", "trl", "recipe", "benchmarks", "tests"}
FOR_A_TRAINER = {"fspo.trl", "fspo.verl"}
#: What a room may import of ours beside itself. The runner: a run folder's files and table. The task: files, texts,
#: intervals.
MAY = {
    "recipe.runner": ("fspo.files", "fspo.table"),
    "recipe.math": ("fspo.fairness.lre", "fspo.files", "fspo.markdown"),
}


def imports() -> dict[str, set[str]]:
    """What each module of ours imports anywhere, also inside functions: ours by full name, others as written."""
    paths = [path for house in ("fspo", "recipe", "benchmarks") for path in sorted((ROOT / house).rglob("*.py"))]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import"
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[module] |= {name if name in modules else str(node.module) for name in full}
    return graph


GRAPH = imports()


def test_the_library_knows_no_trainer() -> None:
    for module, names in GRAPH.items():
        if module.split(".")[0] == "fspo":
            assert not FOR_A_TRAINER & names, module
            assert module in FOR_A_TRAINER or not TRAINERS & {name.split(".")[0] for name in names}, module


@pytest.mark.parametrize("room", MAY)
def test_runner_and_task_know_neither_method_nor_each_other(room: str) -> None:
    for module, names in GRAPH.items():
        ours = [name for name in names if name.startswith(("fspo.", "recipe.", "benchmarks."))]
        others = [name for name in ours if not f"{name}.".startswith((f"{room}.", *MAY[room]))]
        assert not f"{module}.".startswith(f"{room}.") or others == [], module


def test_no_modules_import_each_other() -> None:
    TopologicalSorter({module: names & GRAPH.keys() for module, names in GRAPH.items()}).prepare()  # names a circle


#: What a fresh process imports. verl fixes its platform while it is imported, and a command decides about it first.
LIGHT = """
import sys

def absent(*packages):
    present = set(packages) & {name.split(".")[0] for name in sys.modules}
    assert not present, present

import recipe.math.reward
recipe.math.reward.compute_score("aime24", r"\\boxed{1}", "1")
absent("math_verify", "sympy", "torch", "verl", "ray", "transformers", "datasets")
import recipe.fspo.main
recipe.fspo.main.composed(["experiment=qwen3_8b"])
absent("verl", "ray", "vllm", "transformers")
"""
LIBRARY = """
import sys, fspo.losses, fspo.audit, fspo.check_loss
heavy = {"verl", "ray", "vllm", "hydra", "omegaconf", "transformers", "matplotlib", "recipe"} & set(sys.modules)
assert not heavy, heavy
"""

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


ON_CPUS = {"VERL_PLATFORM": "cpu"}
WRAPPED = ON_CPUS | {"FSPO_AUDIT": "audit"}


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        pytest.param(LIBRARY, {}, id="the library imports nothing heavy"),
        pytest.param(LIGHT, {}, id="commands and rewards import nothing heavy"),
        pytest.param(SIGNALS, {}, id="one thread takes the signals"),
        pytest.param(VERL_ON_CPUS, ON_CPUS, id="verl has losses, platform, trainers", marks=pytest.mark.slow),
        pytest.param(AUDITED, WRAPPED, id="an audit waits for what it wraps", marks=pytest.mark.slow),
        pytest.param(VERL_ON_GPUS, {}, id="a GPU run imports nothing of CPUs", marks=pytest.mark.slow),
    ],
)
def test_in_a_fresh_process(code: str, environment: dict[str, str], tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "FSPO_RUN_ID")}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
