"""``python -m recipe.fspo.main``: its help, its refusals, and the configuration that it prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from composing import composed
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from recipe.fspo.launch.compose import choices
from recipe.fspo.main import main, usage


def test_every_choice_is_named_and_every_named_key_exists() -> None:
    text = usage()
    for group in ("algo", "experiment"):
        for choice in choices(group):
            assert re.search(rf"\b{choice}\b", text), choice
    keys = set(re.findall(r"((?:actor_rollout_ref|data|trainer|fspo)(?:\.\w+)+)=", text))
    assert keys
    config = composed()
    for key in keys:
        assert OmegaConf.select(config, key, default=re) is not re, f"{key} is no key of the configuration"


def test_resume_needs_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["main", f"resume={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert re.fullmatch(rf"error: resume={tmp_path}: .*\n", capsys.readouterr().err)


def test_the_configuration_of_a_gpu_run_is_printed_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main", "experiment=qwen3_8b", "--cfg", "job", "--package", "trainer"])
    before = Singleton.get_state()
    try:
        main()
    finally:
        Singleton.set_state(before)  # Hydra's, which other code of this process reads
    assert "n_gpus_per_node: 8" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
