"""verl's own command: with the recipe's trainer by ``trainer_mode=fspo``, and with an audit of verl's own trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from columns import all_rows, assert_in_force, assert_measured
from real_stack import LATER, SMALL, Starter, measured

from benchmarks.versus_verl import STEPS_FILE, plain_verl
from fspo.files import read_lines
from fspo.table import read_table
from recipe.runner.cpu import fork_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * LATER)]

#: A mask and a correction of verl's that act where the engine computes in bf16, and the trainer in fp32.
KEPT, AT_MOST = (0.998, 1.002), 1.01
CORRECTION = (
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "algorithm.rollout_correction.rollout_is=sequence",
    f"algorithm.rollout_correction.rollout_is_threshold={AT_MOST}",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    f"algorithm.rollout_correction.rollout_rs_threshold='{KEPT[0]}_{KEPT[1]}'",
)


@pytest.fixture(autouse=True)
def workers_are_forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As those of this recipe's runs on CPUs: each of verl's would import verl and vLLM by itself."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # what plain_verl sets is undone
    with fork_server.running(()):
        yield
    assert fork_server.py_executable is None


def logged(folder: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step, of verl's file logger."""
    return {entry["step"]: entry["data"] for entry in read_lines(folder / STEPS_FILE)}


def test_verls_own_command_trains_with_the_recipe_s_trainer(start: Starter, tmp_path: Path) -> None:
    """Twelve steps: a table, ten measured values and metrics, none of them twice. A resume: test_resume.py.

    ``external_lib=fspo.verl`` registers nothing anew: the measured values act.
    """
    folder = tmp_path / "saved"
    mini_batches = "actor_rollout_ref.actor.ppo_mini_batch_size=2"  # few steps without two that have a gradient
    settings = (*SMALL, "trainer.save_freq=-1", "trainer.logger=[file]", mini_batches)
    words, environment = plain_verl(tmp_path, *settings)
    words += ["actor_rollout_ref.actor.policy_loss.loss_mode=fspo", "trainer.v1.trainer_mode=fspo"]
    words += ["actor_rollout_ref.model.external_lib=[recipe.runner.cpu.engine,fspo.verl]"]
    words += [f"trainer.default_local_dir={folder}", "trainer.total_training_steps=12"]
    run = start.module(tmp_path, *words, **environment, VERL_USE_EXTERNAL_PLUGINS="fspo")
    run.ends_with(0)
    values = measured(folder)["clip_values_measured"]
    rows = all_rows(folder)
    assert len(rows) == 12 * 8 * 8 and rows["step"].unique().tolist() == [*range(1, 13)]
    # Of 12 steps three have no mini-batch that counts once in 100,000 runs.
    assert 9 <= len(values) <= 10
    assert_measured(rows, values)
    assert_in_force(rows, values)
    assert measured(folder)["loss_divided_by"] == pytest.approx(rows["L"][rows["step"] == 1].mean())
    table = read_table(folder)
    assert (table.meta["loss"], table.meta["rule"]) == ("fspo", "known")
    metrics = logged(tmp_path)[12]
    assert {"fspo/clip_frac", "fspo/length_trained", "fspo/grad_norm/max"} <= metrics.keys()
    assert "fspo/kl_to_start" not in metrics, "nobody has asked for a reference policy"


def test_verls_own_trainer_trains_with_an_audit(start: Starter, tmp_path: Path) -> None:
    """What is left of the recipe is the audit, of the loss and of verl's correction: the rest is verl's."""
    words, environment = plain_verl(tmp_path, *SMALL, "trainer.save_freq=-1", "trainer.logger=[file]")
    words += ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"]
    words += ["actor_rollout_ref.actor.clip_ratio_low=3e-3", "actor_rollout_ref.actor.clip_ratio_high=4e-3"]
    audit = {"FSPO_AUDIT": str(tmp_path / "audit"), "VERL_USE_EXTERNAL_PLUGINS": "fspo"}
    run = start.module(tmp_path, *words, *CORRECTION, **environment, **audit)
    run.ends_with(0)
    steps = logged(tmp_path)
    assert sorted(steps) == [1, 2]
    assert all(math.isfinite(metrics["actor/pg_loss"]) for metrics in steps.values())
    table = read_table(tmp_path / "audit")
    assert (table.problems, table.meta["loss"], table.meta["rule"]) == ([], "gspo", "known")
    s, length, advantage, inside, kept, weight = (
        table.columns[name].astype(float) for name in ("S", "L", "A", "inside", "kept", "weight")
    )
    first, later = (table.columns["minibatch"] == 0, table.columns["minibatch"] > 0)
    assert abs(s[first]).max() < 1e-4 < abs(s[later]).max()
    # verl's rule, away from its bounds by what a float32 mean is uncertain: it keeps the gradient of a response below
    # the range with A > 0, and above it with A < 0.
    ratio = np.expm1(s / length)
    clear = (abs(ratio - 4e-3) > 1e-5) & (abs(ratio + 3e-3) > 1e-5) & (advantage != 0)
    assert ((inside == 1) == ((ratio >= -3e-3) & (ratio <= 4e-3)))[clear].all()
    assert ((kept == 1) == np.where(advantage > 0, ratio <= 4e-3, ratio >= -3e-3))[clear].all()
    assert (weight[kept == 1] > 0).all()
    # Of a response that the correction rejects as a whole no token is left.
    assert 0 < len(table) < 2 * 8 * 8
