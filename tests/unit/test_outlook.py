"""What a run's clip values would leave outside at its own lengths, in a plan and a dry run."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from composing import composed
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from test_measured import fed

from fspo.clip import FIXED_AFTER
from recipe.fspo.accounting.measured import ClipValues
from recipe.fspo.config import complete_loss
from recipe.fspo.job import JOB
from recipe.fspo.outlook import outlook
from recipe.fspo.state import save_state
from recipe.runner.launch.compose import compose, leaves, parsed, verl_config_dir
from recipe.runner.launch.prepare import on_this_machine


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        # 44%, 54% and 79% are those of the command with these lengths and sigma=0.036.
        ((), ("c_low=0.03", "2000 and 8192 tokens", "54%, 79% if the policy moves", "40%, 40% if S is")),
        (("algo=fspo_v1",), ("40%, 40% if the policy moves",)),
        (("algo=gspo",), ("c_low=0.0003 c_high=0.0004 nats per token^1", "76%, 81% if the policy moves")),
        (("actor_rollout_ref.actor.policy_loss.c_low=0.07",), ("c_low=0.07",)),
        (("run.mean_response=null", "data.max_response_length=1024"), ("512 and 1024 tokens",)),
    ],
)
def test_a_job_names_its_clip_values_and_what_they_would_leave_outside(
    overrides: tuple[str, ...], says: tuple[str, ...]
) -> None:
    lines = list(outlook(composed("experiment=qwen3_8b", "fspo.clip_values=published", *overrides)))
    assert len(lines) == 2
    for words in says:
        assert words in "\n".join(lines)


def test_a_job_that_measures_its_clip_values_says_from_when_on() -> None:
    (line,) = outlook(composed("experiment=qwen3_8b"))
    assert "full learning rate" in line and "85%" in line


@pytest.mark.parametrize(
    ("batches", "says"), [(FIXED_AFTER + 2, f"fixed since step {FIXED_AFTER}"), (3, "after step 3"), (0, "none until")]
)
def test_a_resumed_job_says_which_clip_values_its_checkpoint_has(tmp_path: Path, batches: int, says: str) -> None:
    config = composed("experiment=qwen3_8b")
    complete_loss(config)
    values = ClipValues(config)
    fed(values, 1, batches, lr=config.actor_rollout_ref.actor.optim.lr)
    assert len(values.values) == min(batches, FIXED_AFTER)
    save_state(tmp_path, {"clip_values": values})
    drawn = random.getstate()
    line, *_ = JOB.outlook(config, (), tmp_path)
    assert random.getstate() == drawn, "nothing else of the checkpoint is restored"
    assert line.startswith("clip values: ") and says in line
    assert not batches or f"c_high={values.values[-1]['c_high']:.3g} " in line
    assert "full learning rate" in next(JOB.outlook(config, (), tmp_path / "another"))


SCRIPT = ("actor_rollout_ref.rollout.n=8", "reward_model.reward_manager=dapo", "actor_rollout_ref.model.path=/m")


def of_a_script(*words: str) -> list[str]:
    overrides = parsed(["experiment=own", *SCRIPT, *words])
    return list(JOB.outlook(on_this_machine(compose(JOB, overrides), elsewhere=True), overrides))


def test_what_a_script_leaves_to_defaults_is_named_with_both_values() -> None:
    """Every leaf of verl's own composition that is otherwise here, in at most 20 lines, and no key of the script."""
    overrides = parsed(["experiment=own", "algo=gspo_verl", *SCRIPT])
    config = on_this_machine(compose(JOB, overrides), elsewhere=True)
    lines = list(JOB.outlook(config, overrides))
    text = "\n".join(lines)
    assert len(lines) <= 20
    for key, value, here in (
        ("algorithm.adv_estimator", "gae", "grpo"),
        ("actor_rollout_ref.actor.loss_agg_mode", "token-mean", "seq-mean-token-mean"),
        ("actor_rollout_ref.actor.clip_ratio_high", "0.2", "0.0004"),
        ("trainer.max_actor_ckpt_to_keep", "null", "2"),
        ("reward.custom_reward_function.path", "null", "pkg://recipe.math.reward"),
        ("actor_rollout_ref.ref.fsdp_config.seed", "42", "1"),
    ):
        assert re.search(rf"{re.escape(key)}[^:;]*: {value} -> {here}", text), key
    assert not re.search(r"rollout\.n[,:]|model\.path[,:]|reward_manager\.name", text), "the script has them"
    with initialize_config_dir(config_dir=str(verl_config_dir()), version_base=None):
        of_verl = hydra_compose("ppo_trainer", ["actor_rollout_ref.rollout.n=8", "actor_rollout_ref.model.path=/m"])
    for group in ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm", "data", "trainer"):
        for key, value in leaves(OmegaConf.to_container(OmegaConf.select(of_verl, group), resolve=True), group):
            if not key.endswith("_files") and value != OmegaConf.select(config, key, default=value):
                assert key in text


def test_a_key_of_the_script_is_not_named_and_a_script_without_algo_is_told_what_it_trains() -> None:
    gae, mean = "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.loss_agg_mode=token-mean"
    with_both = "\n".join(of_a_script("algo=grpo", gae, mean))
    assert "adv_estimator" not in with_both and "loss_agg_mode" not in with_both and "algo=fspo" not in with_both
    assert any("algo=" in line and "FSPO" in line for line in of_a_script())
    overrides = parsed(["experiment=gsm8k_0_5b"])
    assert not any("->" in line for line in JOB.outlook(compose(JOB, overrides), overrides))


@pytest.mark.parametrize("algo", ["unclipped", "fspo_quantile", "dapo"])
def test_a_loss_without_clip_values_of_a_band_has_no_line(algo: str) -> None:
    assert list(outlook(composed("experiment=qwen3_8b", f"algo={algo}"))) == []
