"""What the mini-batches of a step add up to, as far as it needs no processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from batches import loss_output, random_batch
from composing import completed, composed

from fspo.audit import read_audit
from fspo.files import read_object
from fspo.losses import sequence_policy_loss
from fspo.table import FOLDER, as_rows, read_table
from fspo.types import BandState
from recipe.fspo.config import policy_loss_settings
from recipe.fspo.recorder import MiniBatch
from recipe.fspo.rollout_batch import Outcomes
from recipe.fspo.step_records import StepRecords
from recipe.runner.faults.errors import ExplainedError
from recipe.runner.progress import PROGRESS, RunLog

N = 8


def outcomes(rewards: list[float]) -> Outcomes:
    """Two prompts, four responses each, the second of each prompt the shortest."""
    keys = [f"{prompt}_{i}_0" for prompt in "ab" for i in range(4)]
    length_B, end_B = torch.tensor([[9, 2, 8, 7, 6, 3, 5, 4], [9, 2, 8, 7, 6, 3, 5, 9]])  # the last has a tool's turn
    info = [{"acc": reward} for reward in rewards]
    return Outcomes(keys, length_B, end_B, torch.tensor(rewards), ["math"] * N, info)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    printed: list[str] = []
    monkeypatch.setattr(PROGRESS, "say", printed.append)
    return printed


REWARDS = [0.0, 1.0] * 4


class Steps:
    """Steps of two mini-batches, of which the policy moves only if there is a gradient."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        settings = (f"trainer.default_local_dir={folder}", "fspo.clip_values=published", "fspo.match_scale=native")
        self.records, self.log, self.step = StepRecords(composed(*settings, *overrides), folder), RunLog(folder, 9), 0

    def __call__(self, rewards: list[float] = REWARDS, advantage: float = 1.0) -> dict[str, float]:
        outputs = [loss_output(N, 20, seed=self.step + 1, scale=0.3 * moved, shortest=1) for moved in (0.0, advantage)]
        parts = [{"S": one.log_ratio_B.numpy(), "L": one.length_B.numpy()} for one in outputs]
        more = {"A": np.full(N, advantage), "row": np.arange(N)[::-1]}
        return self.record([part | more for part in parts], rewards)

    def record(
        self, parts: list[dict[str, Any]], rewards: list[float] = REWARDS, skipped: str = ""
    ) -> dict[str, float]:
        """What these mini-batches add up to; the response of this key is skipped."""
        self.step += 1
        mini_batches = [MiniBatch(as_rows({"row": np.arange(N)} | part), 0.5, 1e-3) for part in parts]
        self.records.add(outcomes(rewards), mini_batches, [skipped] if skipped else [], self.step)
        metrics = self.records.end(self.step)
        self.log.log(metrics | {"timing_s/step": 1.0}, step=self.step)
        return metrics


def test_a_run_notes_each_clip_value_when_it_is_set(tmp_path: Path, lines: list[str]) -> None:
    """A line is printed of the first and the last only; a run may end, or be resumed, between the two."""
    (tmp_path / "run.json").write_text("{}")
    steps = Steps(tmp_path, "algo=fspo", "fspo.clip_values=measured")
    for step in range(1, 6):
        steps()
        noted = read_object(tmp_path / "run.json")["clip_values_measured"]
        assert [value["after_step"] for value in noted] == [*range(1, step + 1)]
    assert sum(line.startswith("clip values: ") for line in lines) == 1
    rows = read_table(tmp_path).columns
    scaled = np.select(
        [rows["step"] == 1 + value["after_step"] for value in noted], [v["c_high"] for v in noted], np.inf
    )
    judged = np.abs(rows["S"]) <= scaled * np.sqrt(rows["L"])
    assert rows["inside"].tolist() == judged.tolist(), "by the band that was in force"
    assert 0 < judged[rows["step"] > 1].mean() < 1 == judged[rows["step"] == 1].mean()


NO_CLIP = BandState(clip_scale=float("inf"))


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("fspo.clip_values=published", None),  # nothing of its band is measured
        ("fspo.clip_values=measured", NO_CLIP),
        ("algo=fspo_v1", NO_CLIP),
        ("algo=luspo ++actor_rollout_ref.actor.policy_loss.drift=kl", NO_CLIP),
    ],
)
def test_a_run_trains_from_the_first_batch_on(words: str, state: BandState | None, tmp_path: Path) -> None:
    """Before anything is measured the workers get the state that says so; without any the loss would refuse."""
    config = completed(f"trainer.default_local_dir={tmp_path}", *words.split())
    assert StepRecords(config, tmp_path).band_state == state
    settings = policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
    assert settings is not None and settings.needs_state == ("algo=" in words)
    assert sequence_policy_loss(*random_batch(4, 20), settings, state).loss_B.isfinite().all()


def test_the_responses_of_each_step_are_rows_of_the_run_s_table(tmp_path: Path) -> None:
    """Each has the outcome of its own response; a step whose responses a correction has all rejected has none."""
    steps = Steps(tmp_path)
    rewards = [0.0, 1.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.25]
    steps(rewards)
    steps.record([{"S": np.full(N, np.nan), "L": np.zeros(N), "A": np.ones(N)}] * 2)
    steps(rewards)
    table = read_table(tmp_path)
    assert not table.problems and len(table) == 4 * N and table.meta["loss"] == "fspo" and table.meta["rule"] == "known"
    columns = table.columns
    assert columns["step"].tolist() == [1] * 2 * N + [3] * 2 * N and table.last == (3, 1)
    assert columns["minibatch"].tolist() == ([0] * N + [1] * N) * 2
    assert columns["reward"].tolist() == rewards * 4
    frame = pd.read_parquet(tmp_path / FOLDER)
    assert frame["id"][:N].tolist() == outcomes(rewards).keys[::-1]
    assert frame["prompt"][:N].tolist() == ["b"] * 4 + ["a"] * 4


def test_a_skipped_response_has_a_row_without_s(tmp_path: Path) -> None:
    """Its padding has no token; length and end are those of the response."""
    both = outcomes(REWARDS)
    part = {"S": np.full(N, 0.1), "L": both.length_B.numpy().copy(), "A": np.ones(N)}
    part["L"][[1, 4]], part["S"][[1, 4]] = 0, np.nan
    metrics = Steps(tmp_path, "data.max_response_length=8").record([part], skipped=both.keys[1])
    assert (metrics["fspo/advantage_zero_frac"], metrics["fspo/truncated_frac"]) == pytest.approx((1 / 7, 3 / 7))
    frame = pd.read_parquet(tmp_path / FOLDER)
    assert frame["id"].tolist() == [key for key in both.keys if key != both.keys[4]], "a rejected one has none"
    assert frame[["S", "A", "L"]].iloc[1].fillna(-1).tolist() == [-1, 0, 2]


@pytest.mark.parametrize("bypass", [False, True])
def test_with_the_engines_pi_old_every_mini_batch_counts(bypass: bool, tmp_path: Path) -> None:
    metrics = Steps(tmp_path, f"algorithm.rollout_correction.bypass_mode={bypass}")()
    assert read_table(tmp_path).meta["every_mini_batch"] == ("yes" if bypass else "no")
    assert len(read_audit(tmp_path).responses.moved()) == N * (1 + bypass)
    assert ("fspo/first_minibatch_z_rms" in metrics) != bypass, "its S is no rounding"


def test_a_table_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    (tmp_path / "responses").write_text("a file in the way")
    with pytest.raises(ExplainedError, match=rf"{tmp_path}/responses cannot be written.*make room"):
        steps()


def test_that_all_advantages_are_0_is_said_once(tmp_path: Path, lines: list[str]) -> None:
    steps = Steps(tmp_path)
    steps([0.0] * 3 + [1.0] + [0.0] * 4)
    assert not [line for line in lines if "advantages" in line]
    metrics = [steps([0.0] * N, advantage=0.0) for _ in range(2)]
    (warning,) = (line for line in lines if "advantages" in line)
    assert "step 2 " in warning
    written = [json.loads(line)["metrics"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(written) == 3
    assert all(of_step["fspo/advantage_zero_frac"] == 1 for of_step in (*metrics, *written[1:]))


def test_a_norm_clip_that_always_binds_is_said_once(tmp_path: Path, lines: list[str]) -> None:
    steps = Steps(tmp_path, "actor_rollout_ref.actor.optim.clip_grad=0.4")
    metrics = [steps() for _ in range(12)][-1]
    assert metrics["fspo/grad_norm/clipped_share"] == 1 and sum("clip_grad=0.4" in line for line in lines) == 1
