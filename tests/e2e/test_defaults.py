"""A default run warns of none of its own settings, and measures its clip values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from real_stack import SMALL, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


#: The demo but for its sizes. Of its groups of 8 equal rewards have 0.42 (37 of 88), 0.5 at most: nine before the last
#: mini-batch have no gradient in 0.2% of the steps, in three of twelve or in the first two once in 100,000 runs.
#: Shorter responses than the demo's would be cut, and warned of.
SMALL_STEPS = (
    *SMALL,
    "data.train_batch_size=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "data.max_response_length=256",
)


@pytest.mark.parametrize(
    ("algo", "sizes"),
    [
        pytest.param("fspo", SMALL_STEPS, id="fspo, small"),
        pytest.param("fspo", (), id="fspo", marks=pytest.mark.nightly),
        pytest.param("gspo", (), id="gspo", marks=pytest.mark.nightly),
    ],
)
def test_the_demo_prints_no_warning_and_sets_its_clip_values(
    start: Starter, tmp_path: Path, algo: str, sizes: tuple[str, ...]
) -> None:
    # The norm clip is warned of after ten steps in a row, and the clip values are fixed after ten that count.
    run = start(tmp_path / algo, *sizes, f"algo={algo}", "trainer.total_training_steps=12", "trainer.save_freq=-1")
    assert run.wait(1000) == 0, run.output()[-4000:]
    output = run.output()
    assert "warning:" not in output and "UserWarning" not in output
    info = json.loads((run.run_dir / "run.json").read_text())
    assert info["clip_values"] == "measured"
    after = [value["after_step"] for value in info["clip_values_measured"]]
    # A step counts unless all mini-batches before its last have no gradient: twelve have ten that do.
    assert len(after) == 10 and after == sorted(set(after)) and after[0] <= 2
    assert re.findall(r"clip values: .* from step (\d+) on", output) == [str(after[0] + 1), str(after[-1] + 1)]
    assert ("loss_divided_by" in info) == ("gradient scale: " in output) == (algo == "fspo")
