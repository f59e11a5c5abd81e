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
from hydra.errors import HydraException
from messages import holds
from omegaconf import DictConfig, OmegaConf

from recipe.fspo.job import choices, compose
from recipe.fspo.main import main, usage
from recipe.runner.launch import compose as runner
from recipe.runner.launch.compose import Refused
from recipe.runner.launch.old_keys import OLD_KEYS, OTHER_NAMES


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


@pytest.mark.parametrize(
    ("override", "not_meant"),
    [
        ("critic.model.fsdp_cfg.param_offload=true", "actor_rollout_ref"),
        ("actor_rollout_ref.actor.tensor_model_parallel_size=2", "rollout.tensor"),
        ("actor_rollout_ref.actor.model_engine=megatron", "did you mean"),
        ("actor_rollout_ref.rollout.use_kl_loss=true", "actor.use_kl_loss"),
        ("actor_rollout_ref.rollout.learning_rate=1", "did you mean"),
        ("actor_rollout_ref.actor.optim.no_such_name=1", "did you mean"),
        # of forks of verl, whose next key has another meaning
        ("actor_rollout_ref.rollout.max_tokens=512", "did you mean"),
        ("actor_rollout_ref.rollout.top_q=1", "did you mean"),
        ("algorithm.rounds_ctrl.type=x", "did you mean"),
        ("algorithm.rounds_ctrl.kl_coef=x", "did you mean"),
        ("algorithm.rollout_is_mode=x", "did you mean"),
        ("data.max_obs_length=8", "did you mean"),
        ("data.min_prompt_length=8", "did you mean"),
        ("reward_model.megatron.param_offload=true", "did you mean"),
        ("reward_model.ulysses_sequence_parallel_size=1", "did you mean"),
        ("gspo=3", "did you mean"),
        ("actor_rollout_ref.rollout.agents=3", "did you mean"),  # agent is a group
        ("loss_mode=fspo", "distillation"),
        ("fspo.loss_mode=fspo", "distillation"),
        ("fspo.type=fixed", "kl_ctrl"),
        ("run.seed=3", "data.seed"),
        ("enable=true", "did you mean"),
        ("actor_rollout_ref.rollout.tp=2", "mtp"),
        ("actor_rollout_ref.rollout.nothing_like_it=1", "would add"),  # verl's class refuses it
    ],
)
def test_no_suggestion_is_another_setting(override: str, not_meant: str) -> None:
    with pytest.raises(HydraException) as error:
        compose([override])
    assert not_meant not in str(error.value)


def test_no_old_key_is_one_of_verls_today() -> None:
    config = composed()
    assert [key for key in OLD_KEYS if OmegaConf.select(config, key, default=re) is not re] == []


def test_other_names_are_those_of_keys() -> None:
    config = composed()
    groups = ("", "actor_rollout_ref.", "actor_rollout_ref.actor.")
    places = [[f"{group}{name}" for group in groups] for name in OTHER_NAMES.values()]
    assert [of for of in places if all(OmegaConf.select(config, key, default=re) is re for key in of)] == []


def test_all_keys_of_a_group_that_has_gone_have_one_line() -> None:
    keys = [f"actor_rollout_ref.actor.megatron.{name}" for name in ("grad_offload", "use_mbridge")]
    with pytest.raises(HydraException) as error:
        compose([f"{keys[0]}=true", "trainer.nnodes=2", f"+{keys[1]}=true"])
    (line,) = str(error.value).splitlines()
    assert re.search(holds(*keys, "Megatron is not served"), line)


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
def test_a_dry_run_plans_on_any_machine_and_writes_nothing(
    new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # what it sets is undone
    settings = ["experiment=qwen3_8b", "algo=gspo", "actor_rollout_ref.rollout.gpu_memory_utilization=0.98"]
    begun = {"status": "failed", "versions": {}, "overrides": settings}
    if not new:
        (tmp_path / "run.json").write_text(json.dumps(begun))
        text = OmegaConf.to_yaml(composed(*settings, f"run.dir={tmp_path}"), resolve=True)
        (tmp_path / "config.yaml").write_text(text)
    before = sorted(tmp_path.iterdir())
    command = [*settings, f"run.dir={tmp_path}"] if new else [f"resume={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["main", *command, "++dry_run=full" if new else "dry_run=full"])
    main()
    printed = capsys.readouterr().out
    for part in (
        "loss_mode: seq_gspo",
        f"dir: {tmp_path}",
        "GiB per GPU",
        "does not fit GPUs of 79.2 GiB, which the plan assumes",
        "not checked on this machine: data.train_files",
    ):
        assert part in printed
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_says_what_matters_in_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    settings = ["experiment=qwen3_8b", "actor_rollout_ref.rollout.n=8", "data.val_files=[a.parquet,b.parquet]"]
    settings += [f"hydra.searchpath=[{tmp_path}]", "hydra.job.name=mine"]
    monkeypatch.setattr(sys, "argv", ["main", *settings, "dry_run=true"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60 and "dry_run=full" in lines[-1]
    at = [next(i for i, line in enumerate(lines) if line.startswith(part)) for part in ("GiB per GPU", "not checked")]
    assert at == sorted(at)
    assert not [line for line in lines if line.startswith(("given actor_rollout_ref.rollout.n=", "given hydra."))]


def test_a_dry_run_says_why_there_is_no_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(sys, "argv", ["main", "experiment=demo", "dry_run=true"])
    main()
    assert "not planned: trainer.device=cpu" in capsys.readouterr().out


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
