"""The loss of docs/extending.md on the real stack, from a folder of the reader's: a grid, its logs and records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_stack import SMALL, user_environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = Path(__file__).resolve().parents[2] / "docs/extending.md"


def test_a_grid_with_a_loss_of_the_readers_own(tmp_path: Path) -> None:
    for name, language in (("my_loss.py", "python"), ("conf/algo/fspo_power.yaml", "yaml")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
        (tmp_path / name).write_text(blocks[0], encoding="utf-8")
    command = [sys.executable, "-m", "recipe.fspo.compare", "out=grid", "hydra.searchpath=[conf]", *SMALL]
    command += ["algos=[fspo,fspo_power]", "seeds=[1]", "trainer.logger=[console,tensorboard]", "trainer.save_freq=-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path, env=user_environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    fspo, power = (tmp_path / "grid/default" / algo / "seed1" for algo in ("fspo", "fspo_power"))
    lines = [json.loads(line) for line in (power / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {1, 2}
    assert any("fspo/lre" in line["metrics"] for line in lines), "its sequences are recorded"
    info = json.loads((power / "run.json").read_text())
    assert info["loss"]["exponent"] == 0.6
    assert info["loss"]["grad_multiplier"] == pytest.approx(1 / 60), "matched, as FSPO's"
    kept = power / "code" / info["code"]["id"] / "elsewhere" / str(tmp_path).lstrip("/")
    assert (kept / "my_loss.py").read_text() == (tmp_path / "my_loss.py").read_text()
    for folder in (fspo, power):
        assert list((folder / "tensorboard").glob("events.*")), "each run has its own"
    assert "fspo_power" in (tmp_path / "grid/report/report.html").read_text()
