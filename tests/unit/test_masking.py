"""Secrets of a configuration stand in nothing that is written or printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from composing import composed
from messages import holds
from omegaconf import OmegaConf
from repository import checkout
from test_run_folder import SMALL_TASK, begun, prepared, saved_by
from verl.trainer import main_ppo
from verl.trainer.ppo.v1 import trainer_base

from recipe.fspo.compare import parse
from recipe.fspo.job import JOB, choices, compose
from recipe.math.data.offline_task import write_dataset
from recipe.runner.faults.errors import explained
from recipe.runner.faults.texts import masked_text
from recipe.runner.launch import code_state as code
from recipe.runner.launch import run_folder
from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.compose import parsed
from recipe.runner.launch.masking import is_secret, masked, masked_output, masked_word, references
from recipe.runner.launch.prepare import prepare
from recipe.runner.launch.run_settings import resume_of
from recipe.runner.launch.values import PreflightError
from recipe.runner.main import main
from recipe.runner.verl_patches.shown import show_configuration

ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
KWARGS = "reward.custom_reward_function.reward_kwargs"


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "data.api_key", "HF_TOKEN", "hf-token", "db_password", "client_secret", "wandbApiKey", "APIKEY"),
        *("OPENAI_KEY_1", "key", "x.token", "aws_secret_access_key", "HF_TOKEN_READ", "a.headers[0].token", "id_token"),
        *("credentials.openai", "api_keys[1]", f"{ENV_VARS}.ANY", "passwd", "Password2"),
    ],
)
def test_a_key_is_that_of_a_secret(key: str) -> None:
    assert is_secret(key)
    assert masked({key: "SECRET1"}) == {key: "***"}
    assert masked({key: "${oc.env:X}"}) == {key: "${oc.env:X}"} and masked({key: None}) == {key: None}
    assert masked({key: "a${oc.env:X}"}) == {key: "***"} and masked({key: "${oc.env:X,SECRET1}"}) == {key: "***"}


@pytest.mark.parametrize(
    "key", ["api_key", "x.token", "OPENAI_KEY_1", "db_password", f"{ENV_VARS}.ANY", "secret_level"]
)
def test_a_number_can_be_a_secret(key: str) -> None:
    assert masked({key: 12345}) == {key: "***"} and "12345" not in masked_word(f"+{key}=12345")


@pytest.mark.parametrize(
    "key", ["reward_kwargs.token_penalty", "num_key_value_heads", "long_prefill_token_threshold", "scheduled_tokens"]
)
def test_a_number_of_tokens_or_keys_is_ordinary(key: str) -> None:
    for value in (4, 0.5):
        assert masked({key: value}) == {key: value} and masked_word(f"+{key}={value}") == f"+{key}={value}"
    assert masked_word("+x.a=nan") == "+x.a=nan"


@pytest.mark.parametrize(
    "key",
    [
        *("tokenizer", "max_tokens", "pad_token_id", "pad_token", "stop_token_ids", "data.prompt_key", "reward_fn_key"),
        *("monkey", "keyboard", "secretary", "tokenization", "skip_tokenizer_init", "token_level", "num_tokens"),
        *("ppo_max_token_len_per_gpu", "distillation.teacher_models.maths.key", "data.answer_key", "token2text"),
        *("solution_key", "data.problem_key", "id_key", "category_key", "split_key", "ground_truth_key"),
        *("format_token", "eot_token", "tool_call_token", "solutionKey"),
    ],
)
def test_a_key_is_ordinary(key: str) -> None:
    assert not is_secret(key) and masked({key: "text"}) == {key: "text"}


@pytest.mark.parametrize("group", ["experiment", "algo", "mode"])
def test_nothing_ordinary_of_a_composed_configuration_is_masked(group: str) -> None:
    for option in choices(group):
        plain = OmegaConf.to_container(composed(f"{group}={option}"))
        assert masked(plain) == plain, option


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://u:SECRET@h.example/p?q=1", "https://***@h.example/p?q=1"),
        (
            "see http://SECRET@h, and postgresql+psycopg2://u:SEC@RET@h:1/db",
            "see http://***@h, and postgresql+psycopg2://***@h:1/db",
        ),
        ("https://h.example/a@b", "https://h.example/a@b"),
        ("pkg://recipe.math.data/x, me@h.example", "pkg://recipe.math.data/x, me@h.example"),
        ("git+ssh://u:SECRET@h/x", "git+ssh://***@h/x"),
    ],
)
def test_an_address_is_written_without_its_password(address: str, shown: str) -> None:
    assert masked_text(address) == masked({"a": address})["a"] == shown


def test_a_word_of_a_command_is_written_without_secrets() -> None:
    assert masked_word("++a.api_key=SECRET1") == "++a.api_key='***'"
    assert masked_word("+a.url=https://u:SECRET1@h/x") == "+a.url='https://***@h/x'"
    assert "SECRET1" not in masked_word(f"+{ENV_VARS}={{A:SECRET1}}") + masked_word("+a=[{token:SECRET1}]")
    for word in ("algo=fspo", "~a.token", "-m", "data.prompt_key=prompt", "+a.token='${oc.env:X}'", "+a.b={c:1}"):
        assert masked_word(word) == word


def test_what_comes_from_the_environment_is_written_as_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "SECRET1")
    monkeypatch.delenv("UNSET", raising=False)
    text = {"a": "${oc.env:MINE}", "b": ["x", "${oc.env:MINE}/y"], "c": "${a}", "d": "${oc.env:UNSET,default}"}
    monkeypatch.setenv("NUMBER", "12")
    config = OmegaConf.create({**text, "n": "${oc.decode:${oc.env:NUMBER}}"})
    named = references(config)
    assert named == {"a": "${oc.env:MINE}", "b[1]": "${oc.env:MINE}/y", "c": "${oc.env:MINE}"}
    OmegaConf.resolve(config)
    assert config.a == config.c == "SECRET1", "the resolver is the usual one again"
    assert masked(OmegaConf.to_container(config), references=named) == {
        "a": "${oc.env:MINE}",
        "b": ["x", "${oc.env:MINE}/y"],
        "c": "${oc.env:MINE}",
        "d": "default",
        "n": 12,
    }


def folder_of_the_user(folder: Path) -> Path:
    (folder / "experiment").mkdir(parents=True)
    text = "reward: {custom_reward_function: {reward_kwargs: {judge_token: SECRETYAML}}}\n"
    text = f"# @package _global_\ndefaults: [demo]\n{text}"
    (folder / "experiment/mine.yaml").write_text(text)
    (folder / "experiment/other.yaml").write_text("a: SECRETOTHER\n")
    (folder / "credentials.yaml").write_text("a: SECRETOTHER\n")
    return folder


def reward_of_the_user(folder: Path) -> str:
    """The override that names a reward function which takes any settings."""
    module = folder / "mine.py"
    module.write_text("def compute_score(data_source, solution_str, **more):\n    return 0.0\n")
    return f"reward.custom_reward_function.path={module}"


def planted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides with a secret of each kind."""
    monkeypatch.setenv("DBPASS", "SECRETOCENV")
    return [
        f"run.dir={folder}/run",
        *SMALL_TASK,
        f"hydra.searchpath=[{folder_of_the_user(folder / 'mine')}]",
        "experiment=mine",
        reward_of_the_user(folder),
        f"++{ENV_VARS}.HF_TOKEN=SECRETOVERRIDE",
        f"++{ENV_VARS}.DB='${{oc.env:DBPASS}}'",
        f"++{KWARGS}.db='${{oc.env:DBPASS}}'",
        f"++{KWARGS}.judge_api_key=SECRETKEY",
        f"++{KWARGS}.again='Bearer ${{{KWARGS}.judge_api_key}}'",
        f"++{KWARGS}.url=https://me:SECRETADDRESS@h.example/v1",
    ]


def test_no_secret_is_in_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(code, "__file__", str(checkout(tmp_path / "checkout") / "module.py"))
    monkeypatch.setitem(os.environ, "HF_TOKEN", "")  # what the code sets is taken back
    monkeypatch.setitem(os.environ, "DB", "")
    overrides = planted(tmp_path, monkeypatch)
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", JOB.command, *overrides])
    start = prepare(compose(overrides), JOB, parsed(overrides))
    kwargs = start.config.reward.custom_reward_function.reward_kwargs
    assert (kwargs.db, kwargs.judge_api_key, kwargs.again) == ("SECRETOCENV", "SECRETKEY", "Bearer SECRETKEY")
    run_folder.begin(start)
    run = tmp_path / "run"
    explained(RuntimeError("refused: Bearer SECRETKEY"), run / "launcher.log", None, None)
    run_folder.end(str(run), "failed", "refused: Bearer SECRETKEY")
    texts = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.name for path in texts} >= {"run.json", "config.yaml", "launcher.log", "diff.patch"}
    assert [str(path) for path, text in texts.items() if b"SECRET" in text] == []
    assert b"x = 2" in next(text for path, text in texts.items() if path.name == "diff.patch")
    written = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    assert written["reward"]["custom_reward_function"]["reward_kwargs"]["db"] == "${oc.env:DBPASS}"
    assert "SECRET" not in "".join(capsys.readouterr())


def test_the_variables_of_a_run_reach_its_own_ray_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "NUMBER"):
        monkeypatch.setenv(name, "before")
    words = (f"run.dir={tmp_path}", *SMALL_TASK, f"++{ENV_VARS}.HF_TOKEN=SECRET1", f"++{ENV_VARS}.NUMBER=3")
    start = prepare(composed(*words), JOB)
    assert (os.environ["HF_TOKEN"], os.environ["NUMBER"]) == ("SECRET1", "3")
    assert "SECRET1" not in str(start.config) and "NUMBER" not in start.config.ray_kwargs.ray_init.runtime_env.env_vars


@pytest.mark.parametrize(
    "override",
    [
        f"++{ENV_VARS}.HF_TOKEN=SECRET1",
        f"++{ENV_VARS}.DB='${{oc.env:DBPASS}}'",
        f"++{ENV_VARS}.PROXY=https://u:SECRET1@h",
        "++ray_kwargs.ray_init._redis_password=SECRET1",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.api_key=SECRET1",
    ],
)
def test_what_ray_or_vllm_would_show_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setenv("DBPASS", "SECRET1")
    shown = (f"++{ENV_VARS}.NCCL_DEBUG=WARN", "++ray_kwargs.ray_init.address=10.0.0.1:6379")  # these are no secrets
    with pytest.raises(PreflightError) as error:
        prepare(composed(f"run.dir={tmp_path}", *SMALL_TASK, override, *shown), JOB)
    key = override.lstrip("+").partition("=")[0]
    assert f"{key}=***" in str(error.value) and "environment" in str(error.value)
    assert "SECRET1" not in str(error.value) and "NCCL_DEBUG" not in str(error.value)


def test_a_resume_takes_secrets_from_the_command_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("MINE", "SECRETMINE")
    key, url = f"{KWARGS}.api_key", f"{KWARGS}.url"
    reference = f"++{KWARGS}.place='${{oc.env:MINE}}'"
    ray = ("++ray_kwargs.ray_init.num_cpus=7", f"++{ENV_VARS}.HF_TOKEN=SECRETTOKEN")
    begun(
        tmp_path, reward_of_the_user(tmp_path), reference, *ray, f"++{key}=SECRETKEY", f"++{url}=https://u:SECRETURL@h"
    )
    saved_by(tmp_path, 1)
    with pytest.raises(PreflightError, match=holds(f"{key}=", f"{url}=", "oc.env")) as error:
        resume_of(parsed([f"resume={tmp_path}"]), JOB)
    assert "HF_TOKEN" not in str(error.value), "the environment has it"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PreflightError, match="HF_TOKEN"):
        resume_of(parsed([f"resume={tmp_path}"]), JOB)
    monkeypatch.setenv("HF_TOKEN", "x")
    again = (f"++{key}=SECRETOTHER", f"++{url}=https://u:SECRETNEW@h")
    monkeypatch.setenv("MINE", "SECRETELSE")
    start = prepared(f"resume={tmp_path}", *again)
    assert f"{ray[0]} is not taken from {tmp_path}" in capsys.readouterr().err
    kwargs = start.config.reward.custom_reward_function.reward_kwargs
    assert (kwargs.place, kwargs.api_key, kwargs.url) == ("SECRETELSE", "SECRETOTHER", "https://u:SECRETNEW@h")
    assert start.changed == () and start.config.ray_kwargs.ray_init.num_cpus == 32
    with pytest.raises(PreflightError, match=holds(f"{url} was", "https://***@other")) as error:
        prepared(f"resume={tmp_path}", again[0], f"{url}=https://u:SECRETNEW@other")
    assert "SECRET" not in str(error.value)


def test_a_run_whose_reward_names_a_column_and_a_token_resumes_with_these_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"solution_key": "answer_text", "eot_token": "<|eot_id|>"}
    begun(tmp_path, reward_of_the_user(tmp_path), *(f"++{KWARGS}.{key}='{value}'" for key, value in names.items()))
    saved_by(tmp_path, 1)
    start = prepared(f"resume={tmp_path}")
    kwargs = start.config.reward.custom_reward_function.reward_kwargs
    assert {key: kwargs[key] for key in names} == names and start.changed == ()


def test_a_secret_that_a_file_of_the_user_refers_to_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeue repeats its command, whose own experiment names the variable."""
    (tmp_path / "mine/experiment").mkdir(parents=True)
    kwargs = "reward: {custom_reward_function: {reward_kwargs: {api_key: '${oc.env:MINE}'}}}"
    (tmp_path / "mine/experiment/mine.yaml").write_text(f"# @package _global_\ndefaults: [demo]\n{kwargs}\n")
    monkeypatch.setenv("MINE", "SECRETMINE")
    words = [f"hydra.searchpath=[{tmp_path}/mine]", "experiment=mine", f"run.dir={tmp_path}/run", *SMALL_TASK]
    words.append(reward_of_the_user(tmp_path))
    run_folder.begin(prepare(compose(words), JOB, parsed(words)))
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    assert "SECRETMINE" not in (tmp_path / "run/config.yaml").read_text()
    for command in (words, [f"resume={tmp_path}/run"]):
        start = prepared(*command)
        assert start.config.reward.custom_reward_function.reward_kwargs.api_key == "SECRETMINE" and start.changed == ()


def test_no_secret_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"run.dir={tmp_path}/run", *SMALL_TASK, f"++{KWARGS}.api_key=SECRET1", reward_of_the_user(tmp_path)]
    words += ["dry_run=full"]
    main(JOB, "", "", words)
    out = capsys.readouterr().out
    assert "api_key: '***'" in out and "SECRET1" not in out
    with pytest.raises(SystemExit):
        main(JOB, "", "", [*words, "trainer.hf_token=SECRETTOKEN", "trainer.nnodes=https://u:SECRETURL@h"])
    assert "SECRET" not in "".join(capsys.readouterr())
    main(JOB, "", "", ["++trainer.hf_token=SECRET1", "--cfg", "job", "--package", "trainer"])
    assert "hf_token: '***'" in capsys.readouterr().out
    with masked_output(parsed(["a.token=SECRETWORD"])):
        print("SECRETWORD", "WORD")
    assert capsys.readouterr().out == "*** WORD\n"


def test_the_command_line_of_the_launching_process_is_masked(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys\n"
        "from recipe.runner.launch.masking import mask_command_line\n"
        "mask_command_line()\n"
        "print(pathlib.Path('/proc/self/cmdline').read_text(), os.environ['KEPT'])"
    )
    command = [sys.executable, "-c", code, "++a.api_key=SECRET1", "algo=fspo"]
    shown = subprocess.run(
        command, env=os.environ | {"KEPT": "kept"}, capture_output=True, text=True, check=True
    ).stdout
    assert "SECRET1" not in shown and "algo=fspo" in shown and "kept" in shown


def test_verl_prints_and_logs_what_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(main_ppo, "pprint", main_ppo.pprint)
    monkeypatch.setattr(trainer_base, "Tracking", lambda **arguments: made.append(arguments))
    show_configuration({"api_key": "***"})
    main_ppo.pprint({"api_key": "SECRET1"})
    assert "SECRET1" not in (out := capsys.readouterr().out) and "***" in out
    trainer_base.Tracking(project_name="a", config={"api_key": "SECRET1"})
    assert made == [{"project_name": "a", "config": {"api_key": "***"}}]


def test_the_settings_of_a_reward_are_on_no_command_line(tmp_path: Path) -> None:
    write_dataset(tmp_path, 64, 8, 0)
    module = tmp_path / "mine.py"
    module.write_text(
        "import pathlib\n"
        f"pathlib.Path({str(tmp_path / 'line')!r}).write_text(pathlib.Path('/proc/self/cmdline').read_text())\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, api_key=None):\n    return 0.0\n"
    )
    custom = (f"reward.custom_reward_function.path={module}", f"++{KWARGS}.api_key=SECRET1")
    prepare(composed(f"run.dir={tmp_path}/run", *SMALL_TASK, *custom), JOB)
    assert str(module) in (line := (tmp_path / "line").read_text()) and "SECRET1" not in line


def test_a_grid_does_not_hand_secrets_on_by_command_lines() -> None:
    with pytest.raises(BadInput, match=holds(f"{KWARGS}.api_key", "oc.env")) as error:
        parse([f"++{KWARGS}.api_key=SECRET1"])
    assert "SECRET1" not in str(error.value)
    assert parse([f"++{KWARGS}.api_key='${{oc.env:NAME}}'"]).overrides[-1].endswith("='${oc.env:NAME}'")
