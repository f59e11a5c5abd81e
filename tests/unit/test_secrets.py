"""A secret that is given by the environment stands in no file and no line; one that is given literally is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from composing import composed
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from recipe.fspo import main
from recipe.runner.launch.secrets import as_given, is_secret, literal_problems, printed_problems, references
from recipe.runner.launch.sweep import Arm

ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
KWARGS = "reward.custom_reward_function.reward_kwargs"
SECRETS = (
    *("api_key", "data.api_key", "HF_TOKEN", "hf-token", "db_password", "client_secret", "wandbApiKey"),
    *("OPENAI_API_KEY_1", "x.token", "aws_secret_access_key", "a.headers[0].token", "credentials.openai"),
    *(f"{ENV_VARS}.HF_TOKEN", "passwd", "api_keys[0]", "judge_key", f"{ENV_VARS}.WANDB_KEY", "hf_token_value"),
    *("OPENAI_KEY", "ssh_key", "encryption_key", "passwords", "secrets", "tokens", "hf_tokens", "session_token"),
)
ORDINARY = (
    *("tokenizer", "max_tokens", "pad_token_id", "pad_token", "stop_token_ids", "data.prompt_key", "reward_fn_key"),
    *("monkey", "skip_tokenizer_init", "num_tokens", "ppo_max_token_len_per_gpu", "token2text"),
    *("distillation.teacher_models.maths.key", "solution_key", "data.problem_key", "id_key", "ground_truth_key"),
    *("format_token", "eot_token", "tool_call_token", "solutionKey", f"{ENV_VARS}.NCCL_DEBUG"),
    *("image_key", "data.reward_model_key", "enable_thinking_key", "num_key_value_heads", "profile_token_start"),
)


def test_which_key_is_that_of_a_secret() -> None:
    assert [key for key in SECRETS if not is_secret(key)] == []
    assert [key for key in ORDINARY if is_secret(key)] == []


LITERAL: tuple[dict[str, Any], ...] = (
    {"api_key": "SECRET"},
    {"api_key": 12345},
    {"api_key": "${oc.env:MINE,SECRET}"},
    {"a": [{"token": "SECRET"}]},
    {"api_keys": ["SECRET"]},
    {"url": "https://u:SECRET@h.example/p"},
)
NO_SECRET: tuple[dict[str, Any], ...] = (
    {"url": "https://h.example/a@b", "mail": "me@h.example"},
    {"api_key": "${oc.env:MINE}", "b_token": "Bearer ${oc.env:MINE}", "c_token": "${api_key}"},
    {"api_key": None, "token": "???", "num_key_value_heads": 4, "token_penalty": 0.5},
    {"penalty_per_token": 0.01, "min_token": 1, "of_each_token": 2, "tokens": [1, 2]},
)


def test_what_is_given_literally_is_refused() -> None:
    for given in LITERAL:
        (problem,) = literal_problems(given)
        assert "export NAME" in problem and "oc.env:NAME" in problem and "SECRET" not in problem
    assert [given for given in NO_SECRET if list(literal_problems(given))] == []


def test_what_comes_from_the_environment_is_written_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "SECRET1")
    monkeypatch.delenv("UNSET", raising=False)
    text = {"a": "${oc.env:MINE}", "b": ["x", "${oc.env:MINE}/y"], "c": "${a}", "d": "${oc.env:UNSET,default}"}
    config = OmegaConf.create(text)
    named = references(config)
    OmegaConf.resolve(config)
    assert config.a == config.c == "SECRET1", "the resolver is the usual one again"
    written = {"a": "${oc.env:MINE}", "b": ["x", "${oc.env:MINE}/y"], "c": "${oc.env:MINE}", "d": "default"}
    assert as_given(config, named) == written


def test_the_words_of_a_command_keep_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """run.json has them, and a resume reads them again."""
    word, arms = f"++{KWARGS}.api_key=${{oc.env:MINE}}", list[Arm]()
    for name, value in {"MINE": "SECRETMINE", "VERL_CONFIG": ""}.items():  # main sets the second
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["main"])
    monkeypatch.setattr(main, "_ARMS", [])
    monkeypatch.setattr(main, "run", lambda arm: arms.append(arm) or 0)
    GlobalHydra.instance().clear()
    assert main.main([word]) == 0 and arms[0].words == (word,)


@pytest.mark.parametrize(
    "override",
    [
        f"++{ENV_VARS}.DB='${{oc.env:MINE}}'",
        "++ray_kwargs.ray_init._redis_password='${oc.env:MINE}'",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.api_key='${oc.env:MINE}'",
    ],
)
def test_what_ray_or_vllm_would_show_is_refused(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setenv("MINE", "SECRET1")
    of_scratch = ("actor_rollout_ref.rollout.engine_kwargs.vllm.download_dir", "ray_kwargs.ray_init.logging_format")
    ordinary = [f"++{key}='${{oc.env:MINE}}/m'" for key in of_scratch]
    config = composed(override, *ordinary, f"++{ENV_VARS}.NCCL_DEBUG=WARN")
    (problem,) = printed_problems(references(config), joins=True)
    assert problem.startswith(override.lstrip("+").partition("=")[0]) and "SECRET1" not in problem
