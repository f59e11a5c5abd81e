"""The files that docs/data-and-rewards.md shows its reader, saved under the names that they give themselves."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from recipe.runner.check_data import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/data-and-rewards.md").read_text(encoding="utf-8")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with these files, and their data."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "own"
    folder.mkdir()
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        if name := re.match(r'"""own/(\w+\.py):', block):
            (folder / name[1]).write_text(block)
    runpy.run_path(str(folder / "make_data.py"))
    return folder


def test_the_demo_files_are_right_and_the_reward_scores_them(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^python -m recipe\.runner\.check_data ((?:.*\\\n)*.*)$", PAGE, re.M)
    (command,) = [line for line in commands if "own/reward.py" in line]
    assert main(shlex.split(command.replace("\\\n", " "))) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert re.search(r"^own/remainder +640  7, 7, 7, 7, 7$", printed, re.M)
    assert re.search(r"^own/difference +640  7, 7, 7, 7, 7$", printed, re.M)
    assert "in several files" not in printed, "a test set is held out"
    scores = dict(re.findall(r"^  row 0 of own/(\w+)_train.parquet, own/\w+: (\S+)    0$", printed, re.M))
    assert scores["difference"] == "1"
    assert 0.9 < float(scores["remainder"]) < 1


def test_a_source_without_a_reward_ends_a_run(own: Path) -> None:
    compute_score: Any = runpy.run_path(str(own / "reward.py"))["compute_score"]
    with pytest.raises(ValueError, match="data_source='own/typo'"):
        compute_score("own/typo", "1", "1")


def test_the_mixed_reward_leaves_other_sources_to_the_recipe(own: Path) -> None:
    compute_score: Any = runpy.run_path(str(own / "mixed_reward.py"))["compute_score"]
    assert compute_score("own/difference", "150-44=106", "106")["score"] == 1.0
    assert compute_score("own/difference", "150-44=107", "106")["status"] == "wrong"
    assert compute_score("math500", r"\boxed{34}", "34", {"problem_id": "math500/1"})["score"] == 1.0
