"""The changes for others in docs/upstream: verl's apply to the installed release, too, and pass their tests there."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs/upstream"
PATCHES = sorted(FOLDER.glob("*.patch"))
_VERL = "\nrepository: verl-project/verl\n"


def test_every_patch_is_listed_and_has_the_form_of_a_pull_request() -> None:
    listed = set(re.findall(r"`([\w-]+\.patch)`", (FOLDER / "README.md").read_text()))
    assert {path.name for path in PATCHES} == listed
    for path in PATCHES:
        head, _, diff = path.read_text().partition("\n---\n")
        assert re.match(r"(\[[\w, ]+\] )?(feat|fix): ", head), path.name
        for part in ("What does this PR do", "Test", "API and Usage Example", "Design & Code Changes"):
            assert f"### {part}" in head, (path.name, part)
        assert re.search(r"^base-commit: [0-9a-f]{40}$", head, re.M)
        assert re.search(r"^repository: [\w-]+/[\w-]+$", head, re.M)
        (tests,) = re.findall(r"^tests: (\S+)$", head, re.M)
        assert f"+++ b/{tests}" in diff


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PATCHES if _VERL in path.read_text()], ids=lambda path: path.stem)
def test_a_patch_passes_its_tests_on_the_installed_verl(path: Path, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "--exclude=docs/*", str(path)], cwd=tmp_path, check=True)
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "PYTHONPATH": str(tmp_path),
    }
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    ended = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-4000:]
