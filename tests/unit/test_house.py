"""The house rules that a machine can check: who imports whom, and what several files must say alike."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.runner import SUPPORTED_VERL

ROOT = Path(__file__).resolve().parents[2]
#: The generic packages of the recipe, lowest first, and those of them that each may import.
GENERIC = {
    "recipe.runner.cpu": set(),
    "recipe.runner.faults": set(),
    "recipe.runner.checkpoints": {"recipe.runner.cpu", "recipe.runner.faults"},
    "recipe.runner.launch": {"recipe.runner.cpu", "recipe.runner.faults", "recipe.runner.checkpoints"},
}
#: What they may import besides: helpers for files, a run folder's records, data and a user's reward, the version of
#: verl, and the table of settings of earlier versions.
ANYONE_MAY = ("fspo.files", "fspo.records", "fspo.data", "fspo.rewards.custom")
#: Lines of Python. They only fall, down to 7,300, 2,800, 5,600, 4,500 and 11,500; raising one needs a line in
#: docs/decisions.md.
LIMITS = {"fspo": 9180, "recipe/fspo": 3010, "recipe/runner": 8220, "benchmarks": 5810, "tests": 17900}
Graph = dict[str, set[str]]


@functools.cache
def sources() -> dict[str, str]:
    """Text of every module of the library, the recipe and the benchmarks, by its dotted name."""
    paths = [path for house in ("fspo", "recipe", "benchmarks") for path in sorted((ROOT / house).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return {name.removesuffix(".__init__"): text for name, text in zip(names, texts, strict=True)}


@functools.cache
def statements(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(sources: dict[str, str]) -> Graph:
    """What each module imports anywhere, also inside functions: our modules by full name, others as written."""
    graph: Graph = {}
    for module, text in sources.items():
        graph[module] = set()
        for node in statements(text):
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names}
            else:
                assert node.level == 0 and node.module, f"{module}:{node.lineno}: imports are absolute"
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[module] |= {name if name in sources else node.module for name in full}
    return graph


def inside(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def breaches(graph: Graph) -> Iterator[str]:
    """Every import against the rules: slurm -> recipe.fspo -> fspo, and generic packages know nothing of the method."""
    for module, imported in graph.items():
        for other in imported:
            if inside(module, "fspo"):
                allowed = not inside(other, "recipe", "benchmarks", "verl", "ray", "vllm", "hydra", "omegaconf")
            else:
                allowed = inside(module, "benchmarks") or not inside(other, "benchmarks")
            for package, lower in GENERIC.items():
                if inside(module, package) and inside(other, "fspo"):
                    allowed &= inside(other, *ANYONE_MAY)
                elif inside(module, package) and inside(other, "recipe"):
                    allowed &= other == "recipe.runner" or inside(other, package, *lower)
            if not allowed:
                yield f"{module} imports {other}"


def cycle(graph: Graph) -> list[str]:
    """Modules that import each other in a circle, in its order; none if there is no circle."""
    done: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        for other in sorted(graph[path[-1]] & graph.keys()):
            if other in path:
                return path[path.index(other) :]
            if other not in done and (found := walk([*path, other])):
                return found
        done.add(path[-1])
        return []

    return next((found for module in graph if module not in done and (found := walk([module]))), [])


def test_imports_go_downwards() -> None:
    assert list(breaches(imports(sources()))) == []


def test_no_modules_import_each_other() -> None:
    assert cycle(imports(sources())) == []


@pytest.mark.parametrize(
    ("module", "text", "says"),
    [
        ("fspo.sums", "import verl", "verl"),
        ("fspo.sums", "def f():\n    from recipe.fspo import config", "recipe.fspo.config"),
        ("recipe.fspo.worker", "import benchmarks.golden", "benchmarks.golden"),
        ("recipe.runner.faults.phase", "import fspo.losses", "fspo.losses"),
        ("recipe.runner.cpu.engine", "from recipe.fspo import worker", "recipe.fspo.worker"),
        ("recipe.runner.cpu.engine", "from recipe.runner.faults.phase import Phase", "recipe.runner.faults.phase"),
        ("recipe.runner.faults.phase", "from recipe.runner.launch.job import Job", "recipe.runner.launch.job"),
        ("recipe.runner.checkpoints.disk", "import recipe.runner.launch.checks", "recipe.runner.launch.checks"),
    ],
)
def test_a_wrong_import_is_noticed(module: str, text: str, says: str) -> None:
    assert module in sources()
    assert list(breaches(imports(sources() | {module: text}))) == [f"{module} imports {says}"]


def test_a_circle_is_noticed() -> None:
    graph = {"a": {"b", "json"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert cycle(graph) == ["b", "c"]
    assert cycle(graph | {"c": set()}) == []


def test_the_wheel_has_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for house in ("fspo", "recipe") for path in (ROOT / house).rglob("__init__.py")}
    assert sorted(listed) == sorted({".".join(path.relative_to(ROOT).parts) for path in folders} | {"recipe.fspo.conf"})


@pytest.mark.parametrize("folder", LIMITS)
def test_a_package_stays_within_its_limit_of_lines(folder: str) -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert lines <= LIMITS[folder], f"{folder} has {lines} lines of Python: delete as much as you add"


def test_every_file_names_the_same_verl() -> None:
    assert f"PIP_INSTALL=pip install verl=={SUPPORTED_VERL}\n" in (ROOT / "recipe/fspo/REQUIRED_VERL.txt").read_text()
    assert f"verl=={SUPPORTED_VERL}" in (ROOT / "pyproject.toml").read_text()
    for name in ("cpu.txt", "gpu.txt"):
        pins = (ROOT / "requirements" / name).read_text()
        assert re.search(rf"^verl=={re.escape(SUPPORTED_VERL)}\b", pins, re.MULTILINE), name
