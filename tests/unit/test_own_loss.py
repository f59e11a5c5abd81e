"""A loss of the user's, as docs/architecture.md shows it: settings, a matched gradient, a comparison, the record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import random_batch
from composing import composed
from hydra.utils import instantiate
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

from fspo.losses import sequence_policy_loss
from fspo.types import SequenceLossSettings
from recipe.fspo import rules as method
from recipe.fspo.job import JOB
from recipe.runner.launch import run_folder, trial
from recipe.runner.launch.compose import parsed
from recipe.runner.launch.prepare import on_this_machine

SEARCH = "hydra.searchpath=[conf]"
KEY = "actor_rollout_ref.actor.policy_loss"
#: The losses that verl registers.
VERLS = sorted(name for name, loss in POLICY_LOSS_REGISTRY.items() if loss.__module__.startswith("verl."))


def problems(config: DictConfig) -> list[str]:
    """What the method and a tried update say."""
    return [*method.problems(config), *trial.problems(config)]


def configured(*overrides: str) -> DictConfig:
    return composed(SEARCH, "algo=fspo_power", *overrides)


def outcome(config: DictConfig) -> tuple[torch.Tensor, Any]:
    """Loss and gradient of the loss as verl calls it."""
    actor = SimpleNamespace(
        policy_loss=instantiate(config.actor_rollout_ref.actor.policy_loss),
        global_batch_info={"global_batch_size": 64, "dp_size": 1},
    )
    inputs = batch()
    inputs["log_prob"].requires_grad_()
    loss, _ = get_policy_loss_fn("fspo_power")(**inputs, loss_agg_mode="token-mean", config=actor)
    loss.backward()
    return loss.detach(), inputs["log_prob"].grad


def batch() -> dict[str, torch.Tensor]:
    columns = random_batch(64, 300, seed=3, scale=0.03, shortest=1)
    return dict(zip(("log_prob", "old_log_prob", "advantages", "response_mask"), columns, strict=True))


def test_it_is_a_loss_like_the_librarys(own_loss: Path) -> None:
    loss, gradient = outcome(configured(f"{KEY}.exponent=0.5"))  # FSPO's band
    inputs = batch()
    inputs["log_prob"].requires_grad_()
    settings = SequenceLossSettings(c_low=0.02, c_high=0.02)
    expected = sequence_policy_loss(
        inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], inputs["response_mask"], settings
    ).loss_B.mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, inputs["log_prob"].grad)


def test_its_settings_are_checked_and_completed(own_loss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(f"{KEY}.exponent=0.7", "fspo.match_scale=matched")
    assert list(problems(config)) == []
    JOB.complete(config)
    loss = config.actor_rollout_ref.actor.policy_loss
    assert (loss.exponent, loss.clip, loss.grad_scale, loss.band) == (0.7, 0.02, "1", "+- clip L^exponent")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"+{KEY}.expnent=1"], r"_target_=my_loss\.PowerLossConfig: .*'expnent'"),
        ([f"{KEY}.exponent=2"], r"_target_=my_loss\.PowerLossConfig: .*exponent=2, .*0 < exponent <= 1"),
        ([f"{KEY}.loss_mode=fspo_pwoer"], r"loss_mode=fspo_pwoer .*fspo_power"),
        ([f"{KEY}._target_=my_los.PowerLossConfig"], r"_target_=my_los\.PowerLossConfig: .*install"),
        ([f"{KEY}._target_=ends.PowerLossConfig"], r"_target_=ends\.PowerLossConfig: SystemExit: 3"),
        (["actor_rollout_ref.model.external_lib=ends"], r"external_lib=ends .*\(SystemExit: 3\): install"),
        (["algo=rloo", "actor_rollout_ref.model.external_lib=same"], r"loss_mode=seq_rloo .*same .*name of its own"),
    ],
)
def test_what_is_wrong_is_said_before_ray_starts(own_loss: Path, overrides: list[str], says: str) -> None:
    (own_loss / "ends.py").write_text("raise SystemExit(3)\n")
    (own_loss / "same.py").write_text(
        "from verl.trainer.ppo.core_algos import register_policy_loss\n\n\n"
        "@register_policy_loss('seq_rloo')\ndef mine(log_prob, **_):\n    return log_prob.sum(), {}\n"
    )
    (problem,) = problems(configured(*overrides))
    assert re.search(says, problem), problem
    assert "install" in says or "install" not in problem, "the module is there"


@pytest.mark.parametrize("named", ["loss_mode", "_target_"])
@pytest.mark.parametrize("loss_mode", VERLS)
def test_a_loss_without_its_class_of_settings_is_told_what_works(loss_mode: str, named: str) -> None:
    """The remedy is taken from the message; with it, verl's own function computes a loss of a small batch."""
    mistake = [f"{KEY}.loss_mode={loss_mode}"] + ([f"~{KEY}._target_"] if named == "_target_" else [])
    (problem,) = problems(composed(*mistake))
    assert f"{KEY}.loss_mode={loss_mode} " in problem and named in problem and "install" not in problem
    *_, remedies = problem.partition("give ")
    for remedy in remedies.split(" or "):
        # Of the mistaken command the name stays.
        config = on_this_machine(composed(mistake[0], *remedy.split(), "run.dir=/nowhere"))
        assert config.actor_rollout_ref.actor.policy_loss.loss_mode == loss_mode
        assert problems(config) == []
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        actor.global_batch_info.update(dp_size=1, batch_num_tokens=64, global_batch_size=64, loss_scale_factor=None)
        loss, _ = get_policy_loss_fn(loss_mode)(**batch(), loss_agg_mode=actor.loss_agg_mode, config=actor)
        assert loss.isfinite()


def test_a_loss_without_settings_is_a_library(own_loss: Path) -> None:
    library = [f"{KEY}._target_=verl.workers.config.PolicyLossConfig", f"~{KEY}.exponent", f"~{KEY}.clip"]
    config = configured(*library, "actor_rollout_ref.model.external_lib=my_loss")
    assert list(method.problems(config)) == []
    (problem,) = trial.problems(config)  # this one reads a setting
    assert f"{KEY}.loss_mode=fspo_power " in problem and "'exponent'" in problem
    JOB.complete(config)
    assert "exponent" not in config.actor_rollout_ref.actor.policy_loss


def test_what_was_run_is_in_the_run_folder(own_loss: Path, tmp_path: Path) -> None:
    from recipe.math.data.offline_task import write_dataset

    overrides = [f"hydra.searchpath=['file://{own_loss}/conf']", "algo=fspo_power"]
    config = on_this_machine(configured(f"run.dir={tmp_path}/run", f"{KEY}.exponent=0.7"))
    assert list(problems(config)) == []
    facts = JOB.complete(config)
    write_dataset(tmp_path / "run/data", 64, 8, 0)
    run_folder.begin(run_folder.Start(config, JOB, tuple(parsed(overrides)), facts=facts))
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["loss"]["exponent"] == 0.7 and info["loss"]["clip"] == 0.02
