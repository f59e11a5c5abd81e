"""A secret that is given by the environment stands in no file and no line; one that is given literally is refused."""

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
from test_run_folder import SMALL_TASK, begun, prepared, saved_by
from verl.trainer import main_ppo
from verl.trainer.ppo.v1 import trainer_base

from recipe.fspo.compare import parse
from recipe.fspo.job import JOB, choices, compose
from recipe.runner.launch import run_folder
from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.compose import parsed
from recipe.runner.launch.prepare import prepare
from recipe.runner.launch.secrets import as_given, is_secret, literal_problems, references
from recipe.runner.launch.values import PreflightError
from recipe.runner.main import main
from recipe.runner.verl_patches.shown import show_configuration

ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
KWARGS = "reward.custom_reward_function.reward_kwargs"
SECRETS = (
    *("api_key", "data.api_key", "HF_TOKEN", "hf-token", "db_password", "client_secret", "wandbApiKey"),
    *("OPENAI_KEY_1", "x.token", "aws_secret_access_key", "a.headers[0].token", "credentials.openai"),
    *(f"{ENV_VARS}.HF_TOKEN", "passwd"),
)
ORDINARY = (
    *("tokenizer", "max_tokens", "pad_token_id", "pad_token", "stop_token_ids", "data.prompt_key", "reward_fn_key"),
    *("monkey", "skip_tokenizer_init", "num_tokens", "ppo_max_token_len_per_gpu", "token2text"),
    *("distillation.teacher_models.maths.key", "solution_key", "data.problem_key", "id_key", "ground_truth_key"),
    *("format_token", "eot_token", "tool_call_token", "solutionKey", f"{ENV_VARS}.NCCL_DEBUG"),
)


def test_which_key_is_that_of_a_secret() -> None:
    assert [key for key in SECRETS if not is_secret(key)] == []
    assert [key for key in ORDINARY if is_secret(key)] == []


@pytest.mark.parametrize("group", ["experiment", "algo", "mode"])
def test_nothing_that_is_shipped_is_a_secret(group: str) -> None:
    for option in choices(group):
        assert list(literal_problems(OmegaConf.to_container(composed(f"{group}={option}")))) == [], option


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"api_key": "SECRET"}, True),
        ({"api_key": 12345}, True),
        ({"api_key": "${oc.env:MINE,SECRET}"}, True),
        ({"a": [{"token": "SECRET"}]}, True),
        ({"url": "https://u:SECRET@h.example/p"}, True),
        ({"api_key": "${oc.env:MINE}", "b_token": "Bearer ${oc.env:MINE}", "c_token": "${api_key}"}, False),
        ({"url": "https://h.example/a@b", "mail": "me@h.example", "api_key": None}, False),
        ({"num_key_value_heads": 4, "token_penalty": 0.5}, False),
    ],
)
def test_what_is_given_literally_is_refused(given: dict[str, Any], refused: bool) -> None:
    problems = list(literal_problems(given))
    assert len(problems) == refused
    assert all(
        "export NAME" in problem and "oc.env:NAME" in problem and "SECRET" not in problem for problem in problems
    )


def test_what_comes_from_the_environment_is_written_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "SECRET1")
    monkeypatch.delenv("UNSET", raising=False)
    text = {"a": "${oc.env:MINE}", "b": ["x", "${oc.env:MINE}/y"], "c": "${a}", "d": "${oc.env:UNSET,default}"}
    config = OmegaConf.create(text)
    named = references(config)
    OmegaConf.resolve(config)
    assert config.a == config.c == "SECRET1", "the resolver is the usual one again"
    written = {"a": "${oc.env:MINE}", "b": ["x", "${oc.env:MINE}/y"], "c": "${oc.env:MINE}", "d": "default"}
    assert as_given(OmegaConf.to_container(config), references=named) == written


def reward_of_the_user(folder: Path) -> str:
    """The override that names a reward function which takes any settings."""
    module = folder / "mine.py"
    module.write_text("def compute_score(data_source, solution_str, **more):\n    return 0.0\n")
    return f"reward.custom_reward_function.path={module}"


def test_a_secret_of_the_environment_is_in_no_file_and_in_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINE", "SECRETMINE")
    run = tmp_path / "run"
    words = [f"run.dir={run}", *SMALL_TASK, reward_of_the_user(tmp_path), f"++{KWARGS}.api_key='${{oc.env:MINE}}'"]
    words.append(f"++{KWARGS}.header='Bearer ${{oc.env:MINE}}'")
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", JOB.command, *words])
    start = prepare(compose(words), JOB, parsed(words))
    assert start.config.reward.custom_reward_function.reward_kwargs.api_key == "SECRETMINE"
    run_folder.begin(start)
    saved_by(run, 1)
    files = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {"run.json", "config.yaml"} <= files.keys()
    assert [name for name, text in files.items() if b"SECRETMINE" in text] == []
    monkeypatch.setenv("MINE", "SECRETELSE")
    again = prepared(f"resume={run}")
    assert again.config.reward.custom_reward_function.reward_kwargs.header == "Bearer SECRETELSE"
    assert again.changed == ()
    for more in (["dry_run=true"], ["--cfg", "job", "--resolve"], [f"{KWARGS}.api_key=3", "dry_run=true", "seed=abc"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_PLATFORM", "cpu")
            try:
                main(JOB, lambda: "", "", [*words, *more])
            except SystemExit as ended:
                assert ended.code == 2
    assert "SECRET" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("where", ["command", "file"])
def test_a_literal_secret_ends_a_start_with_status_2_and_nothing_is_written(tmp_path: Path, where: str) -> None:
    (tmp_path / "mine/experiment").mkdir(parents=True)
    text = "reward: {custom_reward_function: {reward_kwargs: {judge_token: SECRETYAML}}}\n"
    (tmp_path / "mine/experiment/mine.yaml").write_text(f"# @package _global_\ndefaults: [demo]\n{text}")
    of_file = [f"hydra.searchpath=[{tmp_path}/mine]", "experiment=mine"]
    words = of_file if where == "file" else [f"++{KWARGS}.api_key=SECRETWORD", "trainer.hf_token=SECRETTOKEN", "sed=1"]
    command = [sys.executable, "-m", JOB.command, f"run.dir={tmp_path}/run", *words]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "export NAME" in done.stderr, done.stderr
    assert "SECRET" not in done.stderr + done.stdout and not (tmp_path / "run").exists()


def test_a_grid_takes_no_literal_secret() -> None:
    with pytest.raises(BadInput, match=holds(f"{KWARGS}.api_key", "oc.env")) as error:
        parse([f"++{KWARGS}.api_key=SECRET1"])
    assert "SECRET1" not in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        f"++{ENV_VARS}.DB='${{oc.env:MINE}}'",
        "++ray_kwargs.ray_init._redis_password='${oc.env:MINE}'",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.api_key='${oc.env:MINE}'",
    ],
)
def test_what_ray_or_vllm_would_show_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setenv("MINE", "SECRET1")
    shown = (f"++{ENV_VARS}.NCCL_DEBUG=WARN", "++ray_kwargs.ray_init.address=10.0.0.1:6379")  # these are no secrets
    with pytest.raises(PreflightError) as error:
        prepare(composed(f"run.dir={tmp_path}", *SMALL_TASK, override, *shown), JOB)
    assert override.lstrip("+").partition("=")[0] in str(error.value) and "environment" in str(error.value)
    assert "SECRET1" not in str(error.value) and "NCCL_DEBUG" not in str(error.value)


def test_a_run_whose_reward_names_a_column_and_a_token_resumes_with_these_names(tmp_path: Path) -> None:
    names = {"solution_key": "answer_text", "eot_token": "<|eot_id|>"}
    begun(tmp_path, reward_of_the_user(tmp_path), *(f"++{KWARGS}.{key}='{value}'" for key, value in names.items()))
    saved_by(tmp_path, 1)
    start = prepared(f"resume={tmp_path}")
    kwargs = start.config.reward.custom_reward_function.reward_kwargs
    assert {key: kwargs[key] for key in names} == names and start.changed == ()


def test_verl_prints_and_logs_what_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(main_ppo, "pprint", main_ppo.pprint)
    monkeypatch.setattr(trainer_base, "Tracking", lambda **arguments: made.append(arguments))
    show_configuration({"api_key": "${oc.env:X}"})
    main_ppo.pprint({"api_key": "SECRET1"})
    assert "SECRET1" not in (out := capsys.readouterr().out) and "oc.env" in out
    trainer_base.Tracking(project_name="a", config={"api_key": "SECRET1"})
    assert made == [{"project_name": "a", "config": {"api_key": "${oc.env:X}"}}]
