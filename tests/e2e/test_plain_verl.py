"""Plain ``python -m verl.trainer.main_ppo`` knows the losses once this package is installed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict
from real_stack import SMALL, user_environment

from recipe.runner.launch.compose import compose
from recipe.runner.launch.machine import platform_environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_verls_own_trainer_trains_with_fspo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    environment = platform_environment("cpu")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # before verl is imported by what follows
    from verl.workers.config import PolicyLossConfig

    from recipe.runner.launch.start import prepare, write_offline_task

    config = compose([f"fspo.run_dir={tmp_path}", *SMALL, "trainer.save_freq=-1"])
    prepare(config)
    write_offline_task(config)
    with open_dict(config):
        # What is left is verl's own: its trainer, its workers, its loss settings.
        config.trainer.v1.trainer_mode = "sync"
        config.trainer.logger = ["file"]
        config.actor_rollout_ref.model.external_lib = "recipe.runner.cpu.engine"
        policy_loss = config.actor_rollout_ref.actor.policy_loss
        verls = {field.name for field in dataclasses.fields(PolicyLossConfig)}
        for key in set(policy_loss) - verls:  # this recipe's settings of a loss, whichever there are
            policy_loss.pop(key)
        policy_loss._target_ = "verl.workers.config.PolicyLossConfig"
        assert policy_loss.loss_mode == "fspo"
    OmegaConf.save(config, tmp_path / "plain.yaml")
    log = tmp_path / "verl.jsonl"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-path={tmp_path}", "--config-name=plain"]
    run = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}"],
        env={**user_environment(), **environment, "VERL_FILE_LOGGER_PATH": str(log), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    steps = {entry["step"]: entry["data"] for entry in map(json.loads, log.read_text().splitlines())}
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert math.isfinite(metrics["actor/pg_loss"])
        assert "actor/seq_outside_band" in metrics  # only this package's losses report it
