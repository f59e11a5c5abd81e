"""The 8B job as a command of verl's own, which verl's users copy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from composing import composed
from composing import of_verl as verl_config
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from recipe.fspo.checks import notes, problems
from recipe.fspo.config import complete

SCRIPT = Path(__file__).resolve().parents[2] / "recipe/fspo/run_qwen3_8b.sh"
#: Where the script's own paths and loggers stand.
OWN = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path", "trainer.logger")


def words(folder: Path, *more: str) -> list[str]:
    """What the script hands to python3."""
    python = folder / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "DATA": "/my data"}
    done = subprocess.run([SCRIPT, *more], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.fixture
def of_verl(tmp_path: Path) -> tuple[DictConfig, list[str]]:
    """verl's own configuration with the script's overrides, and their keys."""
    module, *overrides = words(tmp_path, "trainer.nnodes=2")[1:]
    assert module == "verl.trainer.main_ppo" and overrides[-1] == "trainer.nnodes=2"
    return verl_config(*overrides[:-1]), [word.partition("=")[0] for word in overrides[:-1]]


def test_verl_takes_every_key(of_verl: tuple[DictConfig, list[str]]) -> None:
    config, _ = of_verl
    assert problems(config) == [*notes(config)] == complete(config) == []
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert config.data.train_files == "/my data/dapo_math_17k.parquet" and len(config.data.val_files) == 4


def test_its_values_are_those_of_the_experiment(of_verl: tuple[DictConfig, list[str]]) -> None:
    config, keys = of_verl
    job = composed("experiment=qwen3_8b")
    differ = {key: (OmegaConf.select(config, key), OmegaConf.select(job, key)) for key in keys if key not in OWN}
    assert {key: values for key, values in differ.items() if values[0] != values[1]} == {}
