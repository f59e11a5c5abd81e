"""Promise 29: imports go one way, and the library is light without verl."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise(29)
ROOT = Path(__file__).parents[2]
#: What fspo/ knows nothing of, but for the two modules that are for a trainer.
TRAINERS = {"verl", "ray", "vllm", "hydra", "omegaconf", "trl", "recipe", "benchmarks", "tests"}
FOR_A_TRAINER = {"fspo/trl.py", "fspo/verl.py"}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of(folder: str) -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield from ((str(path.relative_to(ROOT)), name) for name in imported(path))


def test_the_library_knows_no_trainer() -> None:
    wrong = [(path, name) for path, name in of("fspo") if name.split(".")[0] in TRAINERS and path not in FOR_A_TRAINER]
    assert wrong == []
    assert [path for path, name in of("fspo") if name in ("fspo.trl", "fspo.verl")] == []


@pytest.mark.parametrize(("room", "unknown"), [("runner", ("fspo", "math")), ("math", ("fspo", "runner"))])
def test_runner_and_task_know_neither_method_nor_each_other(room: str, unknown: tuple[str, ...]) -> None:
    wrong = [(path, name) for path, name in of(f"recipe/{room}") for other in unknown
             if name == f"recipe.{other}" or name.startswith(f"recipe.{other}.")]  # fmt: skip
    assert wrong == []


LIGHT = "import sys, fspo.losses, fspo.audit, fspo.check_loss; print(*sorted({n.split('.')[0] for n in sys.modules}))"


def test_the_library_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()}
    assert loaded & {"verl", "ray", "vllm", "hydra", "omegaconf", "transformers", "matplotlib", "recipe"} == set()
