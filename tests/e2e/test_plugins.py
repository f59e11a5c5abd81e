"""The runner and the recipe are two plugins of verl: each works where verl loads only one of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from columns import all_rows

from benchmarks.starts import SMALL, Start
from benchmarks.versus_verl import STEPS_FILE, plain_verl
from fspo.records import FUNNEL_FILE, complete_lines
from fspo.table import read_table
from recipe.fspo.reporter import NOTES_FILE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

#: A recipe without a loss of its own: verl's GRPO in the runner's care. With its configuration 40 lines at most.
JOB = """
import sys
from pathlib import Path

from recipe.math.data.offline_task import score_answer, write_dataset
from recipe.runner.launch.job import Job
from recipe.runner.main import main

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return score_answer(solution_str, ground_truth)

def conclude(config):
    print("of the recipe:", [name for name in sys.modules if name.startswith("recipe.fspo")])

if __name__ == "__main__":
    job = Job("grpo", Path(__file__).with_suffix(".yaml"), write_data=write_dataset, conclude=conclude)
    main(job, "usage", "a loop", sys.argv[1:])
"""
CONFIG = """
defaults: [ppo_trainer, run, cpu, _self_]
data:
  offline_task: {n_train: 64, n_test: 8, seed: 0}
  train_files: ${run.dir}/data/train.parquet
  val_files: ${run.dir}/data/test.parquet
  train_batch_size: 8
  max_prompt_length: 16
  max_response_length: 64
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: 'pkg://recipe.math.data/assets/demo_model', external_lib: recipe.runner.cpu.engine}
  actor: {ppo_mini_batch_size: 4, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 2048}
  rollout: {n: 8, max_model_len: 512, log_prob_use_dynamic_bsz: true, log_prob_max_token_len_per_gpu: 2048}
reward: {custom_reward_function: {path: grpo.py, name: compute_score}}
trainer: {experiment_name: grpo, total_training_steps: 2, val_before_train: false, test_freq: -1, save_freq: 2,
          v1: {trainer_mode: runner}}
"""

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


def test_verls_own_grpo_trains_in_the_runners_care(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text(JOB)
    (tmp_path / "grpo.yaml").write_text(CONFIG)
    start = Start(tmp_path, "grpo", "run.dir=run", VERL_USE_EXTERNAL_PLUGINS="runner")
    try:
        assert start.process.wait(600) == 0, start.output()[-6000:]
    finally:
        start.stop()
    steps = complete_lines(tmp_path / "run/metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert math.isfinite(step["metrics"]["actor/pg_loss"])
        assert not [name for name in step["metrics"] if name.startswith("fspo/")]
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "finished"
    assert (tmp_path / "run/checkpoints/global_step_2").is_dir()
    assert "of the recipe: []" in start.output()


@pytest.mark.parametrize(
    "ends",
    # A resume by the same hooks: test_resume.py
    [pytest.param((12,), id="one start"), pytest.param((8, 12), id="two starts", marks=pytest.mark.nightly)],
)
def test_verls_own_command_trains_with_the_recipe_s_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...]
) -> None:
    """Twelve steps: a table, measured values and metrics, none of them twice, without a run folder.

    ``external_lib=fspo.verl`` registers nothing anew: the measured values act.
    """
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # what it sets is undone
    folder = tmp_path / "saved"
    mini_batches = "actor_rollout_ref.actor.ppo_mini_batch_size=2"  # few steps without two that have a gradient
    settings = (*SMALL, "trainer.save_freq=8", "trainer.logger=[file]", mini_batches)
    words, environment = plain_verl(tmp_path, *settings)
    words += ["actor_rollout_ref.actor.policy_loss.loss_mode=fspo", "trainer.v1.trainer_mode=fspo"]
    words += ["actor_rollout_ref.model.external_lib=[recipe.runner.cpu.engine,fspo.verl]"]
    words += [f"trainer.default_local_dir={folder}", "++trainer.resume_mode=auto"]
    notes = []
    for steps in ends:
        more = f"trainer.total_training_steps={steps}"
        start = Start(tmp_path, *words, more, **environment, VERL_USE_EXTERNAL_PLUGINS="fspo")
        try:
            assert start.process.wait(600) == 0, start.output()[-6000:]
        finally:
            start.stop()
        notes.append(json.loads((folder / NOTES_FILE).read_text()))
    before, after = (facts["clip_values_measured"] for facts in (notes[0], notes[-1]))
    assert after[: len(before)] == before, "a resumed training goes on with the values of its checkpoint"
    assert notes[0]["loss_divided_by"] == notes[-1]["loss_divided_by"] > 1
    assert 0 < before[0]["c_low"] == before[0]["c_high"]
    assert before[-1]["after_step"] <= ends[0] and after[-1]["after_step"] > 8
    table = read_table(folder)
    assert (table.problems, table.meta["loss"], table.meta["rule"]) == ([], "fspo", "known")
    assert len(all_rows(folder)) == 12 * 8 * 8 and np.unique(table.columns["step"]).tolist() == [*range(1, 13)]
    steps, c = [one["after_step"] for one in after], [math.inf, *(one["c_low"] for one in after)]
    band = np.array(c)[np.searchsorted(steps, table.columns["step"])] * table.columns["L"] ** 0.5
    assert (table.columns["inside"] == (abs(table.columns["S"]) <= band)).mean() > 0.99, "but for rounding at the edge"
    assert 0 < (table.columns["inside"] == 0).mean() < 0.5
    assert [line["step"] for line in complete_lines(folder / FUNNEL_FILE)] == [*range(1, 13)]
    logged = {entry["step"]: entry["data"] for entry in complete_lines(tmp_path / STEPS_FILE)}
    assert {"fspo/clip_frac", "fspo/funnel/length_trained", "fspo/grad_norm/max"} <= logged[12].keys()
    assert "fspo/kl_to_start" not in logged[12], "nobody has asked for a reference policy"
    assert not (tmp_path / "run.json").exists() and not (folder / "run.json").exists()


@pytest.mark.parametrize("loss", ["gspo", pytest.param("vanilla", marks=pytest.mark.nightly)])
def test_verls_own_trainer_trains_with_an_audit(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the recipe is the audit, of the loss and of verl's correction: the rest is verl's."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # what it sets is undone
    settings = (*SMALL, "trainer.save_freq=-1", "trainer.logger=[file]")
    words, environment = plain_verl(tmp_path, *settings)
    words += [f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"]
    if loss == "gspo":
        words += ["actor_rollout_ref.actor.clip_ratio_low=3e-3", "actor_rollout_ref.actor.clip_ratio_high=4e-3"]
    audit = {"FSPO_AUDIT": str(tmp_path / "audit"), "VERL_USE_EXTERNAL_PLUGINS": "fspo"}
    start = Start(tmp_path, *words, *CORRECTION, **environment, **audit)
    try:
        assert start.process.wait(600) == 0, start.output()[-6000:]
    finally:
        start.stop()
    steps = {entry["step"]: entry["data"] for entry in complete_lines(tmp_path / STEPS_FILE)}
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert math.isfinite(metrics["actor/pg_loss"])
        assert "actor/seq_outside_band" not in metrics  # only this package's losses report it
    assert start.output().count("FSPO_AUDIT: ") == 1 and f"loss {loss}" in start.output()
    correction = read_table(f"{tmp_path / 'audit'}-correction")
    assert (correction.problems, correction.meta["loss"], len(correction)) == ([], "rollout_correction", 2 * 8 * 8)
    s, length, kept, weight = (correction.columns[name].astype(float) for name in ("S", "L", "kept", "weight"))
    # verl's rule, away from its bounds by what a float32 sum is uncertain
    outside = np.maximum(-s / length - math.log(KEPT[1]), math.log(KEPT[0]) + s / length)
    assert (kept[abs(outside) > 1e-6] == (outside < 0)[abs(outside) > 1e-6]).all() and 0 < kept.sum() < len(kept)
    np.testing.assert_allclose(weight[kept == 1], np.minimum(np.exp(s), AT_MOST)[kept == 1], atol=1e-5)
    assert (weight[kept == 1] < 0.999).any() and (abs(weight[kept == 1] - AT_MOST) < 1e-6).any()
    table = read_table(tmp_path / "audit")
    assert (table.problems, table.meta["loss"], table.meta["rule"]) == ([], loss, "known")
    assert len(table) == kept.sum()  # of a response that is rejected as a whole no token is left
    moved = table.columns["minibatch"] > 0
    columns = {name: values[moved] for name, values in table.columns.items()}
    for step, metrics in steps.items():
        logged = {name for name in metrics if name.startswith("fspo_audit")}
        of_step = columns["step"] == step
        assert {"fspo_audit/length_short", "fspo_audit/S_std_long"} <= logged
        if "fspo_audit/accept_rate" in logged:  # some S is not 0
            inside, kept = (float(columns[name][of_step].astype(float).mean()) for name in ("inside", "kept"))
            assert metrics["fspo_audit/accept_rate"] == pytest.approx(inside, rel=1e-6)
            assert metrics["fspo_audit/removed"] == pytest.approx(1 - kept, abs=1e-6)
