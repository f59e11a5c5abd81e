"""A user's own data and reward: the example of docs/data-and-rewards.md, and a reward that fails while it trains."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from real_stack import SMALL, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
PAGE = (Path(__file__).resolve().parents[2] / "docs/data-and-rewards.md").read_text(encoding="utf-8")


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
    assert run.wait(500) == 0, run.output()[-4000:]
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"
    steps = run.steps()
    assert set(steps) == {0, 1, 2}
    assert (tmp_path / "checkpoints/global_step_2").is_dir(), "the last step is saved"
    assert "ends the run after 2 steps" in run.output()
    for source in ("own/remainder", "own/difference"):
        assert f"val-core/{source}/acc/mean@1" in steps[2], "the last step is validated"
        assert 0 <= steps[0][f"val-core/{source}/acc/mean@1"] <= 1
    assert steps[0]["val-core/own/remainder/acc/mean@1"] > 0.2, "the demo's model knows remainders"
    assert -0.1 <= steps[2]["critic/rewards/mean"] <= 1
    config = OmegaConf.load(tmp_path / "config.yaml")
    assert config.reward.custom_reward_function.path == f"{tmp_path}/own/reward.py"
    assert not (tmp_path / "data").exists(), "the demo's own task is not written"
    assert own.items() <= {path: path.read_bytes() for path in tmp_path.glob("own/*") if path.is_file()}.items()
    assert run.left_behind() == []


#: Fails at a response here and there, as a parser of answers does.
FAILING = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    first, _, rest = solution_str.partition("=")
    return float(len(first) / len(rest))
"""


def test_an_exception_in_a_reward_ends_the_run_with_its_traceback(start: Starter, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(FAILING)
    run = start(tmp_path, *SMALL, f"reward.custom_reward_function.path={reward}", "trainer.total_training_steps=5")
    assert run.wait(400) == 1
    message = (
        rf"^error: the reward function \(compute_score of {reward}\) failed on a response to "
        r"data_source='fspo/remainder', extra_info\.index=\d+: it raised ZeroDivisionError: division by zero\n"
        rf'  File "{reward}", line 4, in compute_score\n'
    )
    assert re.search(message, run.output(), re.M), run.output()[-3000:]
    assert "\n  response: '" in run.output()
    assert not list(tmp_path.glob("checkpoints/global_step_*"))
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"
    assert run.left_behind() == []
