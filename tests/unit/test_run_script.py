"""The 8B job as a command of verl's own, which verl's users copy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from composing import composed, of_verl
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from recipe.fspo.checks import notes, problems
from recipe.fspo.config import complete

SCRIPT = Path(__file__).resolve().parents[2] / "recipe/fspo/run_qwen3_8b.sh"
#: Where the script's own paths and loggers stand.
OWN = {"data.train_files", "data.val_files", "actor_rollout_ref.model.path", "trainer.logger"}


def test_the_script_is_the_8b_job_in_verl_s_own_command(tmp_path: Path) -> None:
    """verl takes every key, and the values are those of the experiment."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "/my data"}
    done = subprocess.run([SCRIPT, "trainer.nnodes=2"], env=environment, capture_output=True, text=True, check=True)
    _, module, *words, last = done.stdout.split("\0")[:-1]
    assert (module, last) == ("verl.trainer.main_ppo", "trainer.nnodes=2")
    config, job, keys = of_verl(*words), composed("experiment=qwen3_8b"), {word.partition("=")[0] for word in words}
    for key in keys - OWN:
        assert OmegaConf.select(config, key) == OmegaConf.select(job, key), key
    assert problems(config) == [*notes(config)] == complete(config) == []
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert config.data.train_files == "/my data/dapo_math_17k.parquet" and len(config.data.val_files) == 4
