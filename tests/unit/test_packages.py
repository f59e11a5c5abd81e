"""A package that a setting needs and that is missing is named before the start, with setting and remedy."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from composing import composed
from messages import holds

from recipe.fspo.job import JOB
from recipe.runner.launch import loggers, packages
from recipe.runner.launch.prepare import check, on_this_machine
from recipe.runner.launch.values import MachineProblem, PreflightError
from recipe.runner.launch.without_effect import CommandKeys

ROOT = Path(__file__).resolve().parents[2]
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
FUSED = f"{MODEL}.use_fused_kernels=true"


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What a run with such settings says where no package is installed."""

    def find(*overrides: str) -> list[str]:
        config = composed(*overrides)  # looks for verl
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: None)
            return [*packages.optional_package_problems(config)]

    return find


@pytest.mark.parametrize(
    ("experiment", "overrides", "package", "remedy"),
    [
        ("demo", f"{MODEL}.use_liger=true", "liger_kernel", "liger-kernel>=0.8.2"),
        ("qwen3_8b", f"{MODEL}.use_liger=true", "liger_kernel", "false"),
        ("demo", "critic.model.use_liger=true critic.enable=true", "liger_kernel", "false"),
        ("demo", f"{MODEL}.fused_kernel_options.impl_backend=liger {FUSED}", "liger_kernel", "torch"),
        ("demo", f"{MODEL}.fused_kernel_options.impl_backend=triton {FUSED}", "triton", "torch"),
        ("demo", f"{MODEL}.override_config.attn_implementation=flash_attention_2", "flash_attn_2_cuda", "=sdpa"),
        ("demo", f"{ACTOR}.fsdp_config.qat.enable=true", "triton", "false"),
        ("demo", f"{ROLLOUT}.quantization=torchao", "torchao", "fp8"),
        ("demo", f"{ROLLOUT}.checkpoint_engine.backend=nccl mode=separate_async", "cupy", "requirements/gpu.txt"),
        ("demo", f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded", "cupy", "requirements/gpu.txt"),
        ("demo", f"{ROLLOUT}.checkpoint_engine.backend=nixl", "nixl", "nccl"),
        ("demo", f"{ROLLOUT}.checkpoint_engine.backend=mooncake", "mooncake", "mooncake-transfer-engine"),
        ("demo", f"{ROLLOUT}.checkpoint_engine.backend=kimi_ckpt_engine", "checkpoint_engine", "checkpoint-engine"),
        ("demo", "transfer_queue.backend.storage_backend=MooncakeStore", "mooncake", "SimpleStorage"),
        ("demo", "transfer_queue.backend.storage_backend=Yuanrong", "yr", "openyuanrong-datasystem"),
        ("demo", f"{ROLLOUT}.trace.backend=weave", "weave", "null"),
        ("demo", f"{ROLLOUT}.trace.backend=mlflow", "mlflow", "null"),
        ("demo", f"{ROLLOUT}.trace.backend=trackio", "trackio", "null"),
        ("demo", "reward.reward_model.rollout.name=sglang reward.reward_model.enable=true", "sglang", "vllm"),
        ("demo", "global_profiler.tool=nsys", "nvtx", "torch"),
        ("demo", f"{ACTOR}.optim.optimizer_impl=bitsandbytes.optim", "bitsandbytes", "torch.optim"),
    ],
)
def test_a_setting_whose_package_is_missing(
    problems: Callable[..., list[str]], experiment: str, overrides: str, package: str, remedy: str
) -> None:
    before = problems(f"experiment={experiment}")
    more = [problem for problem in problems(f"experiment={experiment}", *overrides.split()) if problem not in before]
    assert [problem for problem in more if re.search(holds(overrides.split()[0], f" {package} ", remedy), problem)]
    assert all(isinstance(problem, MachineProblem) for problem in more)  # a dry run may be for another machine


@pytest.mark.parametrize(
    "overrides",
    [
        f"{MODEL}.use_liger=false",
        f"{MODEL}.fused_kernel_options.impl_backend=liger",
        "critic.model.use_liger=true",
        "reward.reward_model.rollout.name=sglang",
        "reward.reward_model.rollout.name=vllm reward.reward_model.enable=true",
        f"{ROLLOUT}.checkpoint_engine.backend=naive",
        "global_profiler.tool=torch",
        f"{MODEL}.lora_rank=8",
    ],
)
def test_a_setting_that_imports_nothing(problems: Callable[..., list[str]], overrides: str) -> None:
    assert problems("experiment=qwen3_8b", *overrides.split()) == problems("experiment=qwen3_8b")


def test_the_packages_that_the_shipped_jobs_need(problems: Callable[..., list[str]]) -> None:
    flash, torch = problems("experiment=qwen3_8b")
    setting = f"{MODEL}.override_config.attn_implementation=flash_attention_2"
    assert re.search(holds(setting, " flash_attn_2_cuda ", "requirements/gpu-flash-attn.txt"), flash)
    assert re.search(holds("optimizer_impl=torch.optim", " torch "), torch)
    assert [problem for problem in problems("experiment=qwen3_8b", "mode=separate_async") if "cupy" in problem]
    assert not [problem for problem in problems("experiment=demo") if " torch " not in problem]


def test_packs_need_flash_attn_only_where_it_computes_the_attention(problems: Callable[..., list[str]]) -> None:
    """transformers' sdpa tells the sequences of a pack apart by their positions; null is verl's own choice."""
    attention = f"{MODEL}.override_config.attn_implementation"
    assert not [problem for problem in problems("experiment=qwen3_8b", f"{attention}=sdpa") if "flash_attn" in problem]
    (flash,) = (problem for problem in problems("experiment=qwen3_8b", f"~{attention}") if "flash_attn" in problem)
    assert re.search(holds(f"{MODEL}.use_remove_padding=true", "=sdpa"), flash)


def test_a_run_with_liger_is_refused_before_ray_starts(tmp_path: Path) -> None:
    """As a user starts it: with every rule, on a machine that has no such package."""
    task = ("data.offline_task.n_train=32", "data.offline_task.n_test=8")
    overrides = (f"run.dir={tmp_path}", *task, f"{MODEL}.use_liger=true")
    config = on_this_machine(composed(*overrides))
    with pytest.raises(PreflightError, match=holds(f"{MODEL}.use_liger=true", "liger-kernel")):
        check(config, JOB, command=CommandKeys(config, JOB, overrides))


#: What verl 0.9.1 imports as well, beside requirements/gpu.txt: of other engines and devices, or for no setting.
ELSEWHERE = {
    *("megatron", "megatron_fsdp", "mindspeed", "torchtitan", "veomni", "nemo_automodel", "fsdp_turbo"),
    *("modelopt", "multistorageclient", "transformer_engine", "vllm_ascend", "sglang_router", "nvidia"),
    *("hdfs_io", "modelscope"),  # a path of HDFS; a variable of the environment, refused by the import of verl
    "prefix_grouper",  # of verl's older trainer
    "trl",  # for a critic whose model has no head for single tokens
    *("flashinfer", "pynvml"),  # by other names in requirements/gpu.txt
    "flash_attn",  # which is asked for by its kernels
}


def test_every_package_that_verl_may_import_is_known() -> None:
    """After a new pin: another one is a setting's, and belongs into the table, or nobody's here."""
    required = (ROOT / "requirements/gpu.txt").read_text(encoding="utf-8")
    names = {re.split(r"[=\[ ]", line)[0].lower().replace("_", "-") for line in required.splitlines()}
    distributions, known = packages_distributions(), {need.package for need in packages.NEEDS} | ELSEWHERE
    known |= {"fla", "verl", *sys.stdlib_module_names, *loggers._LOGGERS, *loggers._PACKAGES.values()}
    folder = Path(find_spec("verl").submodule_search_locations[0])
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")]
    modules = {name.partition(".")[0] for tree in trees for node in ast.walk(tree) for name in imported_by(node)}
    unknown = {
        module
        for module in modules - known
        if not names & {name.lower().replace("_", "-") for name in (module, *distributions.get(module, ()))}
    }
    assert unknown == set()


def imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module and node.level == 0 else []
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
