"""A user's own data and reward: the example of docs/data.md."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from real_stack import LATER, REPOSITORY, SMALL, Starter, latest_step

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * LATER)]
PAGE = (REPOSITORY / "docs/data.md").read_text(encoding="utf-8")


def test_the_example_trains_and_validates(start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        if name := re.match(r'"""(own/\w+\.py):', block):
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("own/make_data.py")
    commands = re.findall(r"^python -m recipe\.fspo\.main ((?:.*\\\n)*.*)$", PAGE, re.M)
    (command,) = [shlex.split(line.replace("\\\n", " ")) for line in commands if "own/reward.py" in line]
    assert any("own/remainder_train.parquet,own/difference_train.parquet" in word for word in command)
    own = {path: path.read_bytes() for path in tmp_path.glob("own/*")}
    small = [setting for setting in SMALL if not setting.startswith(("trainer.test_freq", "trainer.val_before"))]
    # It ends by its epoch, after two steps.
    ends = ("data.train_max_samples=16", "trainer.total_epochs=1", "trainer.total_training_steps=9")
    val = ("trainer.val_before_train=true", "actor_rollout_ref.rollout.val_kwargs.n=1")
    run = start(tmp_path, *command, *small, *val, *ends)
    run.ends_with(0)
    assert run.info()["status"] == "finished"
    steps = run.steps()
    assert sorted(steps) == [0, 1, 2] and latest_step(tmp_path) == 2, "the last step of the epoch is saved"
    for source in ("own/remainder", "own/difference"):
        name = f"val-core/{source}/acc/mean@1"
        assert 0 <= steps[0][name] <= 1 and name in steps[2], "the last step is validated"
    assert steps[0]["val-core/own/remainder/acc/mean@1"] > 0.2, "the demo's model knows remainders"
    assert -0.1 <= steps[2]["critic/rewards/mean"] <= 1
    config = OmegaConf.load(tmp_path / "config.yaml")
    assert config.reward.custom_reward_function.path == f"{tmp_path}/own/reward.py"
    assert not (tmp_path / "data").exists(), "the demo's own task is not written"
    assert own.items() <= {path: path.read_bytes() for path in tmp_path.glob("own/*") if path.is_file()}.items()
