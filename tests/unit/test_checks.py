"""Checks of the machine, and what the method adds to a configuration; their refusals are in refusals.py."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from composing import composed
from hydra.utils import instantiate
from messages import holds

from fspo.losses import ALGORITHMS
from recipe.fspo import rules as method
from recipe.fspo.config import complete_loss
from recipe.runner import SUPPORTED_VERL
from recipe.runner.launch import checks, model_files
from recipe.runner.launch.prepare import on_this_machine
from recipe.runner.launch.values import MachineProblem

ACTOR = "actor_rollout_ref.actor"
#: As many problems as one step needs, so that they are written quickly.
SMALL_TASK = ["data.offline_task.n_train=32", "data.offline_task.n_test=8"]


@pytest.mark.parametrize(
    ("nodes", "size", "replicas"),
    [(1, -1, 1), (8, -1, 1), (1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 4, 2), (8, 4, 8), (8, 8, 4), (2, 8, 1), (2, 16, 1)],
)
def test_the_check_of_room_counts_every_replica(tmp_path: Path, nodes: int, size: int, replicas: int) -> None:
    def needed(*overrides: str) -> tuple[float, str]:
        config = on_this_machine(composed(f"run.dir={tmp_path}", "trainer.max_actor_ckpt_to_keep=9999999", *overrides))
        (problem,) = checks.room_problems(config)
        return float(re.search(r"need ([\d.]+) GiB", problem)[1]), problem

    key = f"{ACTOR}.fsdp_config.fsdp_size"
    gib, problem = needed(f"trainer.nnodes={nodes}", "trainer.n_gpus_per_node=4", f"{key}={size}")
    assert gib == pytest.approx(replicas * needed()[0], rel=1e-3)
    assert (f"{replicas} replicas" in problem and f"{key}={size}" in problem and f"{key}=-1" in problem) is (
        replicas > 1
    )


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What a run with such settings says where no package is installed."""

    def find(*overrides: str) -> list[str]:
        config = composed("run.dir=/nowhere", *overrides)  # looks for verl
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: None)
            return list(checks.package_problems(config))

    return find


_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("experiment=demo", {"vllm": "make setup", "transfer_queue": "TransferQueue"}),
        ("experiment=demo actor_rollout_ref.model.use_liger=true", {"liger_kernel": r"use_liger=true.*liger-kernel"}),
        ("experiment=qwen3_8b", {"flash_attn_2_cuda": r"=flash_attention_2: .*gpu-flash-attn\.txt.*=sdpa"}),
        (f"experiment=qwen3_8b ~{_ATTENTION}", {"flash_attn_2_cuda": "use_remove_padding=true: .*=sdpa"}),
        (f"experiment=qwen3_8b {_ATTENTION}=sdpa", {}),
        ("experiment=qwen3_8b mode=separate_async", {"cupy": r"backend=nccl: .*requirements/gpu\.txt"}),
        ("experiment=demo mode=separate_async", {}),  # through shared memory
    ],
)
def test_a_package_that_is_missing_is_named_with_its_setting(
    missing: Callable[..., list[str]], overrides: str, says: dict[str, str]
) -> None:
    sentences = missing(*overrides.split())
    assert all(isinstance(sentence, MachineProblem) for sentence in sentences)  # a dry run may be for another machine
    for package, words in says.items():
        assert [s for s in sentences if f" {package} " in s and re.search(words, s)], (package, sentences)
    optional = {re.search(r"package (\S+) is", sentence)[1] for sentence in sentences} - {"vllm", "transfer_queue"}
    flash = {"flash_attn_2_cuda"} if "qwen3_8b" in overrides and "=sdpa" not in overrides else set()
    assert optional == ({*says} | flash) - {"vllm", "transfer_queue"}


def test_another_release_of_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("run.dir=/nowhere")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.8.0")
    assert re.search(holds("verl 0.8.0 ", SUPPORTED_VERL), next(checks.package_problems(config)))


@pytest.mark.parametrize(
    ("address", "variable", "prepared"),
    [
        (None, None, "local"),  # by itself Ray would join what the temp folder names
        (None, "", "local"),
        ("local", "10.0.0.1:6379", "local"),
        (None, "10.0.0.1:6379", None),
        ("auto", None, "auto"),
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
    ],
)
def test_a_run_starts_a_ray_of_its_own_unless_it_is_told_a_cluster(
    address: str | None, variable: str | None, prepared: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setenv("FSPO_RUN_ID", "a-run")
    key = "ray_kwargs.ray_init.address"
    override = f"~{key}" if address is None else f"{key}={address}"  # no experiment but the demo has it
    ray_init = on_this_machine(composed(f"run.dir={tmp_path}", *SMALL_TASK, override)).ray_kwargs.ray_init
    assert ray_init.get("address") == prepared
    starts = prepared == "local"
    assert ("num_cpus" in ray_init) == ("num_gpus" in ray_init) == starts, "ray.init refuses both where it joins"
    assert ("FSPO_RUN_ID" in ray_init.runtime_env.env_vars) != starts


def test_one_key_turns_a_loss_of_verls_into_one_of_the_librarys() -> None:
    config = composed("algo=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=fspo", "run.dir=/nowhere")
    assert list(method.problems(config)) == []
    complete_loss(config)
    assert instantiate(config.actor_rollout_ref.actor.policy_loss).settings() == ALGORITHMS["fspo"]


def test_a_run_names_every_setting_of_its_loss() -> None:
    config = composed("algo=rloo", "run.dir=/nowhere", "actor_rollout_ref.actor.policy_loss.c_high=0.3")
    complete_loss(config)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    named = {field.name: policy_loss[field.name] for field in dataclasses.fields(ALGORITHMS["seq_rloo"])}
    assert named == dataclasses.asdict(ALGORITHMS["seq_rloo"]) | {"c_high": 0.3}


def test_a_quantised_checkpoint_is_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        model_files, "read_model_config", lambda config: {"quantization_config": {"quant_method": "fp8"}}
    )
    problems = list(checks.setting_problems(composed(f"actor_rollout_ref.model.path={tmp_path}")))
    assert [
        text for text in problems if re.search(holds(f"model.path={tmp_path} ", "quantization_config", "=fp8"), text)
    ]
