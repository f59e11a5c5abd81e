"""The code of a run: its commit, and the difference from it, which a run folder keeps for each state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from composing import composed
from repository import checkout

from recipe.fspo.job import JOB
from recipe.runner.launch import code_state as code
from recipe.runner.launch import run_folder
from recipe.runner.launch.prepare import on_this_machine
from recipe.runner.launch.run_folder import Start


def test_edited_code_is_noted_and_both_versions_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = checkout(tmp_path / "checkout"), tmp_path / "run"
    monkeypatch.setattr(code, "__file__", str(folder / "module.py"))
    config = on_this_machine(composed(f"run.dir={run}"))
    for number in (3, 4):
        assert "note: code was " not in capsys.readouterr().out
        (folder / "module.py").write_text(f"x = {number}\n")
        run_folder.begin(Start(config, JOB))
        (run / "metrics.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    assert "note: code was " in capsys.readouterr().out
    info = json.loads((run / "run.json").read_text())
    (change,) = info["changed"]
    patches = [(run / "code" / change[when] / "diff.patch").read_text() for when in ("old", "new")]
    assert [f"+x = {number}\n" in patch for number, patch in zip((3, 4), patches, strict=True)] == [True, True]
    assert info["dirty"] is True and change["key"] == "code" and change["new"] == info["code"]["id"]
    assert not any("SECRET" in patch for patch in patches), "what is new since the commit is no code of the run"


def test_a_checkout_that_git_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkout(tmp_path / "checkout")
    monkeypatch.setattr(code, "__file__", str(folder / "module.py"))
    assert code.code_state().problem is None
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to try it
    state = code.code_state()
    assert "dubious ownership" in (state.problem or "") and state.facts()["dirty"] is None
    monkeypatch.setattr(code, "__file__", str(tmp_path / "module.py"))
    assert code.code_state().problem is None, "no checkout"
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    monkeypatch.setattr(code, "__file__", str(folder / "module.py"))
    monkeypatch.setattr(code, "_GIT_S", 0)
    assert code.code_state().problem and code.code_state().facts()["dirty"] is None, "git takes too long"
