"""The code of a run, as run.json has it: the commit, and whether anything differs from it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from composing import composed

from recipe.fspo.job import JOB
from recipe.runner.launch import code_state as code
from recipe.runner.launch import run_folder
from recipe.runner.launch.prepare import on_this_machine
from recipe.runner.launch.run_folder import Start


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that holds the package."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(code, "__file__", str(folder / "module.py"))
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "x")
    return folder


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@x", *words], check=True)


def test_a_new_file_and_an_edit_are_dirt_and_another_commit_is_a_change(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code.code_state()["dirty"] is False
    (checkout / "new.py").touch()
    assert code.code_state()["dirty"] is True
    config = on_this_machine(composed(f"run.dir={tmp_path}/run"))
    run_folder.begin(Start(config, JOB))
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "y")
    capsys.readouterr()
    run_folder.begin(Start(config, JOB))
    assert "note: commit was " in capsys.readouterr().out
    info = json.loads((tmp_path / "run/run.json").read_text())
    (change,) = info["changed"]
    assert info["dirty"] is False and change["key"] == "commit" and change["new"] == info["commit"] != change["old"]


def test_what_git_does_not_say_is_unknown(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"commit": None, "dirty": None}
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to try it
    assert code.code_state() == unknown
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    monkeypatch.setattr(code, "__file__", str(tmp_path / "module.py"))
    assert code.code_state() == unknown, "no checkout"
