"""What stands beside the code: the page of settings, the release, the files of the repository's host, the examples."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from benchmarks.settings import FILES, PAGE, page, settings_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_settings_is_the_programs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m benchmarks.settings writes it"


def test_a_setting_without_a_comment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.yaml").write_text("fspo:\n  first: 1    # one\n  second: 2\n")
    monkeypatch.setitem(FILES, "fspo", tmp_path / "base.yaml")
    with pytest.raises(ValueError, match=r"base\.yaml: fspo\.second=2 .*write one"):
        list(settings_of("fspo"))


def test_the_version_has_one_place() -> None:
    """pyproject.toml. The newest release in the list of changes is that one."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", changes, re.M)[0]
    assert changes.index("## [Unreleased]") < changes.index(f"[{released}]") and released == version


def test_the_jobs_are_the_parts_of_the_command_of_ci() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    script = ROOT / ".ci/run"
    assert re.findall(r"\.ci/run(?: (\w+))?", commands) == ["lint", "unit", "stack"] and script.stat().st_mode & 0o100
    assert {"lint", "unit", "stack"} <= set(re.findall(r"^    (\w+)\)", script.read_text(), re.M))
    assert jobs["publish"]["needs"] == ["lint", "unit"]
    for template in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"):
        head = yaml.safe_load(template.read_text().split("---")[1])
        assert {"name", "about"} <= head.keys(), template


def test_the_own_loop_trains_and_is_audited(tmp_path: Path) -> None:
    """That of TRL: tests/unit/test_trl.py; without verl: tests/unit/test_wheel.py."""
    command = [sys.executable, str(ROOT / "examples/own_loop.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "LRE" in ended.stdout and list((tmp_path / "audit").glob("responses-*.parquet"))
