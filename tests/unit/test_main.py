"""``python -m recipe.fspo.main``: its help, its refusals, and the configuration that it prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from composing import composed
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import OmegaConf

from recipe.fspo.main import main, usage
from recipe.runner.launch.compose import choices, compose, did_you_mean, for_hydra


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


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor_rollout_ref.actor.optim.lrr", "actor_rollout_ref.actor.optim.lr?"),
        ("actor_rollout_ref.actor.optm.lr", "actor_rollout_ref.actor.optim.lr?"),
        ("lr", "actor_rollout_ref.actor.optim.lr or critic.optim.lr?"),
        ("fspo.clip_low", "actor_rollout_ref.actor.policy_loss.clip_low?"),
        ("trainer.n_gpus", "trainer.n_gpus_per_node?"),
        ("resum", "resume?"),
        ("qqqqqq", ""),
    ],
)
def test_a_mistyped_key_gets_a_suggestion(key: str, meant: str) -> None:
    said = did_you_mean(key, composed(), own=("resume",))
    assert said == (f"\nDid you mean {meant}" if meant else "")


def test_a_mistyped_key_is_refused_with_the_suggestion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["main", "algo=gspo", "expriment=demo"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "'expriment'.\nDid you mean experiment?\nTo append" in capsys.readouterr().err


def test_a_word_for_true_or_false_is_refused() -> None:
    for given in ("evaluate=ture", "trainer.val_before_train=no", "actor_rollout_ref.actor.use_kl_loss=Flase"):
        with pytest.raises(HydraException, match=f"{given}: give true or false"):
            compose(["algo=gspo", given])
    assert compose(["trainer.experiment_name=on", "evaluate=TRUE"]).evaluate is True


def test_a_folder_of_the_users_adds_to_verls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine/algo").mkdir(parents=True)
    (tmp_path / "mine/algo/other.yaml").write_text("# @package _global_\nfspo: {algo: other}\n")
    monkeypatch.chdir(tmp_path)
    given = ["hydra.searchpath=[mine]", "algo=other"]
    assert compose(given).fspo.algo == "other"
    assert "other" in choices("algo", given)
    assert for_hydra(given)[-1] == f"hydra.searchpath=['pkg://verl.trainer.config','file://{tmp_path}/mine']"
    with pytest.raises(HydraException, match=r"--config-dir: give 'hydra.searchpath=\[FOLDER\]'"):
        for_hydra(["--config-dir=mine", "algo=other"])
    with pytest.raises(HydraException, match="nowhere is not a folder"):
        compose(["hydra.searchpath=[nowhere]"])
