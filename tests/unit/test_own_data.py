"""The files that docs/data.md shows its reader, saved under the names that they give themselves."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs/data.md").read_text(encoding="utf-8")


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


def test_a_source_without_a_reward_ends_a_run(own: Path) -> None:
    compute_score: Any = runpy.run_path(str(own / "reward.py"))["compute_score"]
    with pytest.raises(ValueError, match="data_source='own/typo'"):
        compute_score("own/typo", "1", "1")
