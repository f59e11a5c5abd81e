"""``python -m recipe.fspo.main``: its help, its refusals, and the configuration that it prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from composing import composed
from hydra import compose as hydra_compose
from messages import holds
from omegaconf import DictConfig, OmegaConf

from recipe.fspo.job import choices, compose
from recipe.fspo.main import main, usage
from recipe.runner.launch import compose as runner
from recipe.runner.launch.compose import Refused


def test_every_choice_is_named_and_every_named_key_exists() -> None:
    text = usage()
    for group in ("algo", "experiment"):
        for choice in choices(group):
            assert re.search(rf"\b{choice}\b", text), choice
    keys = set(re.findall(r"((?:actor_rollout_ref|data|trainer|fspo|run)(?:\.\w+)+)=", text))
    assert keys
    config = composed()
    for key in keys:
        assert OmegaConf.select(config, key, default=re) is not re, f"{key} is no key of the configuration"


def test_the_help_is_made_only_for_who_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recipe.fspo.main.usage", lambda: "made")
    monkeypatch.setattr(sys, "argv", ["main", "--help"])
    main()
    assert capsys.readouterr().out == "made"
    monkeypatch.setattr("recipe.fspo.main.usage", lambda: pytest.fail("made"))
    refused(monkeypatch, capsys, "--multirun")


def test_ctrl_c_while_the_program_is_imported_is_a_sentence(tmp_path: Path) -> None:
    """As in a terminal, it goes to the whole process group; -X importtime says when Hydra is imported."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "recipe.fspo.main", f"run.dir={tmp_path}/run"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if "omegaconf" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert [line for line in rest.splitlines() if not line.startswith("import time:")] == [
        "interrupted before the run began: nothing saved"
    ]
    assert not list(tmp_path.iterdir())


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["main", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", [TypeError, ValueError, AttributeError, RecursionError])
@pytest.mark.parametrize("words", [[], ["trainer.nothing_like_it=8"]], ids=["right", "wrong"])
def test_an_internal_error_is_no_users(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], words: list[str]
) -> None:
    def broken(*_: object) -> None:
        raise kind("cannot be copied: algo=gspo")

    monkeypatch.setattr(DictConfig, "__deepcopy__", broken)
    monkeypatch.setattr(sys, "argv", ["main", "algo=gspo", *words])
    with pytest.raises(kind, match="cannot be copied"):
        main()


@pytest.mark.parametrize(
    ("words", "times"),
    [
        ([], 1),
        (["trainer.nnodes=2", "algo=gspo"], 1),
        (["trainer.n_gpus=1"], 1),
        (["trainer.n_gpus=1", "lr=1", "data.x.y=1", "~trainer.nothing"], 1),
        (["algo=fsop"], 2),
        (["algo=fsop", "trainer.n_gpus=1"], 2),
    ],
)
def test_a_command_puts_the_groups_together_once_and_once_more_for_an_unknown_option(
    words: list[str], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        runner, "hydra_compose", lambda *args, **more: calls.append(args) or hydra_compose(*args, **more)
    )
    runner._compose.cache_clear()
    try:
        compose(words)
    except Refused as error:
        assert len(error.problems) == len(words) - words.count("algo=gspo")
    assert len(calls) == times


@pytest.mark.parametrize(
    "content",
    [
        b"defaults: 3",
        b"defaults: [3]",
        b"defaults: [[a]]",
        b"3",
        b"a: [",
        b"\ta: 1",
        b"a: \xe9",
        b"a: 1\na: 2",
        b"b: ${a",
    ],
)
def test_a_file_of_the_users_that_cannot_be_composed_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "experiment/mine.yaml"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(Refused, match=holds("experiment=mine", str(file), "correct")):
        compose([f"hydra.searchpath=[{tmp_path}]", "experiment=mine"])


def test_the_configuration_of_a_gpu_run_is_printed_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main", "experiment=qwen3_8b", "--cfg", "job", "--package", "trainer"])
    main()
    assert "n_gpus_per_node: 8" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_all_problems_are_named_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown keys and options, and what is wrong with the rest."""
    wrong = ("algo=fsop", "trainer.n_gpus=1", "seed=1,2", "evaluate=ture", "mode=null", "actor_rollout_ref.rollout.n=0")
    more = ("--config-name=mine", "'b'", "+data.seed=3", "trainer.experiment_name=a:(b)", "trainer.nothing_like_it=1")
    error = refused(monkeypatch, capsys, "experiment=demo", *wrong, *more, "--config-path", "config", "dry_run=true")
    for name in (*wrong, *more, "--config-path=config"):
        assert name.removesuffix("=1") in error, error


def test_a_folder_of_the_users_adds_to_verls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine/algo").mkdir(parents=True)
    (tmp_path / "mine/algo/other.yaml").write_text("# @package _global_\nfspo: {algo: other}\n")
    monkeypatch.chdir(tmp_path)
    overrides = ["hydra.searchpath=[mine]", "algo=other"]
    assert compose(overrides).fspo.algo == "other"
    assert "other" in choices("algo", overrides)


@pytest.mark.parametrize("new", [True, False])
def test_a_dry_run_ends_on_any_machine_and_writes_nothing(
    new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # what it sets is undone
    settings = ["experiment=qwen3_8b", "algo=gspo"]
    begun = {"status": "failed", "versions": {}, "overrides": settings}
    if not new:
        (tmp_path / "run.json").write_text(json.dumps(begun))
        text = OmegaConf.to_yaml(composed(*settings, f"run.dir={tmp_path}"), resolve=True)
        (tmp_path / "config.yaml").write_text(text)
    before = sorted(tmp_path.iterdir())
    command = [*settings, f"run.dir={tmp_path}"] if new else [f"resume={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["main", *command, "++dry_run=true" if new else "dry_run=true"])
    main()
    printed = capsys.readouterr().out
    assert "not checked on this machine: data.train_files" in printed
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_lists_what_the_machine_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    settings = ["experiment=qwen3_8b", "trainer.logger=[console,clearml]", f"run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["main", *settings, "data.val_files=/elsewhere/a.parquet", "dry_run=true"])
    main()
    printed = capsys.readouterr().out
    for part in ("pip install clearml", "data.val_files: /elsewhere/a.parquet", "data.train_files", "flash_attn"):
        assert re.search(f"^not checked on this machine: .*{re.escape(part)}", printed, re.M), part
