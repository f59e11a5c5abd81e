"""The house rules that a machine can check: who imports whom, how long a module may be, what versions files name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from recipe.fspo import SUPPORTED_VERL

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for house in ("fspo", "recipe", "benchmarks") for path in (ROOT / house).rglob("*.py"))
FOREIGN = {"verl", "ray", "vllm", "hydra", "recipe"}


def imported(path: Path) -> set[str]:
    """Top-level packages that a module imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_short_and_import_downwards(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400
    if path.is_relative_to(ROOT / "fspo"):
        assert not imported(path) & FOREIGN
    if path.is_relative_to(ROOT / "recipe"):
        assert "benchmarks" not in imported(path)
    if path.name == "__init__.py" and path.is_relative_to(ROOT / "recipe"):
        assert not imported(path) & FOREIGN


def test_every_file_names_the_same_verl() -> None:
    assert f"PIP_INSTALL=pip install verl=={SUPPORTED_VERL}\n" in (ROOT / "recipe/fspo/REQUIRED_VERL.txt").read_text()
    assert f"verl=={SUPPORTED_VERL}" in (ROOT / "pyproject.toml").read_text()
    for name in ("cpu.txt", "gpu.txt"):
        pins = (ROOT / "requirements" / name).read_text()
        assert re.search(rf"^verl=={re.escape(SUPPORTED_VERL)}\b", pins, re.MULTILINE), name
