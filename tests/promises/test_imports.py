"""Promise 29: imports go one way, and the library is light without verl."""

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


@pytest.mark.parametrize("code", [LIBRARY, LIGHT], ids=["library", "commands and rewards"])
def test_a_fresh_process_imports_nothing_heavy(code: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
