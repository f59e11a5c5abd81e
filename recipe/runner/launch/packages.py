"""The packages of a run: those of every run, and those that verl 0.9.1 imports only because of a setting.

The latter are imported by processes that start later: without them the run would end after minutes, or go on without
what the setting asks for. verl's wheel requires peft itself; the loggers' packages are in
:mod:`recipe.runner.launch.loggers`. This module imports neither verl nor ray.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner import SUPPORTED_VERL
from recipe.runner.launch import inputs
from recipe.runner.launch.values import MachineProblem

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Need:
    """A package that verl imports because of a setting.

    Attributes:
        key: The setting.
        values: Those with which verl imports the package.
        package: Its name in Python.
        remedy: How to install it, and what to set instead.
        only_with: Another setting and its value, without which the first one has no effect.
    """

    key: str
    values: tuple[Any, ...]
    package: str
    remedy: str
    only_with: tuple[str, Any] | None = None

    def of(self, config: DictConfig) -> bool:
        """Whether a run with this configuration needs the package."""
        return OmegaConf.select(config, self.key) in self.values and (
            self.only_with is None or OmegaConf.select(config, self.only_with[0]) == self.only_with[1]
        )


_ATTENTION: Final = f"{_MODEL}.override_config.attn_implementation"
_FLASH: Final = f"install requirements/gpu-flash-attn.txt, or set ++{_ATTENTION}=sdpa, which is slower"
_LIGER: Final = "pip install 'liger-kernel>=0.8.2'"
_FUSED: Final = f"{_MODEL}.fused_kernel_options.impl_backend"
_BACKEND: Final = f"{_ROLLOUT}.checkpoint_engine.backend"
_STORAGE: Final = "transfer_queue.backend.storage_backend"
_JUDGE: Final = "reward.reward_model.rollout.name"
_MOONCAKE: Final = "pip install mooncake-transfer-engine"

#: Of the engines that are served.
NEEDS: Final = (
    # verl's own choice. With sdpa transformers masks the sequences of a pack by their positions. The kernels are asked
    # for: where they are not compiled, flash_attn may be its cross-entropy alone (requirements/bundle.sh).
    Need(f"{_MODEL}.use_remove_padding", (True,), "flash_attn_2_cuda", _FLASH, (_ATTENTION, None)),
    Need(_ATTENTION, ("flash_attention_2",), "flash_attn_2_cuda", _FLASH),
    Need(f"{_MODEL}.use_liger", (True,), "liger_kernel", f"{_LIGER}, or set it to false"),
    Need("critic.model.use_liger", (True,), "liger_kernel", f"{_LIGER}, or set it to false", ("critic.enable", True)),
    # Without the package verl takes its own code without a word.
    Need(_FUSED, ("liger",), "liger_kernel", f"{_LIGER}, or set it to torch", (f"{_MODEL}.use_fused_kernels", True)),
    Need(_FUSED, ("triton",), "triton", "set it to torch", (f"{_MODEL}.use_fused_kernels", True)),
    Need(f"{_ACTOR}.fsdp_config.qat.enable", (True,), "triton", "it comes with requirements/gpu.txt; set it to false"),
    Need(f"{_ROLLOUT}.quantization", ("torchao",), "torchao", "pip install torchao, or set it to fp8"),
    Need(_BACKEND, ("nccl", "nixl", "delta_sharded"), "cupy", "install requirements/gpu.txt"),
    Need(_BACKEND, ("nixl",), "nixl", "pip install nixl, or set it to nccl"),
    Need(_BACKEND, ("mooncake",), "mooncake", f"{_MOONCAKE}, or set it to nccl"),
    Need(_BACKEND, ("kimi_ckpt_engine",), "checkpoint_engine", "pip install checkpoint-engine, or set it to nccl"),
    Need(_STORAGE, ("MooncakeStore",), "mooncake", f"{_MOONCAKE}, or set it to SimpleStorage"),
    Need(_STORAGE, ("Yuanrong",), "yr", "pip install openyuanrong-datasystem, or set it to SimpleStorage"),
    *(
        Need(f"{_ROLLOUT}.trace.backend", (name,), name, f"pip install {name}, or set it to null")
        for name in ("mlflow", "trackio", "weave")
    ),
    Need(_JUDGE, ("sglang",), "sglang", "set it to vllm", ("reward.reward_model.enable", True)),
    Need(_JUDGE, ("trtllm",), "tensorrt_llm", "set it to vllm", ("reward.reward_model.enable", True)),
    Need("global_profiler.tool", ("nsys",), "nvtx", "pip install nvtx, or set it to torch"),
    Need("global_profiler.tool", ("npu",), "torch_npu", "set it to torch"),
    Need("global_profiler.tool", ("precision_debugger",), "msprobe", "set it to torch"),
)


def package_problems(config: DictConfig) -> Iterator[str]:
    """Another release of verl, or packages that its wheel does not bring."""
    installed = importlib.metadata.version("verl")
    if installed != SUPPORTED_VERL:
        yield f"verl {installed} is installed, and this is written for {SUPPORTED_VERL}: pip install the latter"
    for package, remedy in (
        ("vllm", "run `make setup`, or install requirements/gpu.txt"),
        ("transfer_queue", "pip install TransferQueue>=0.1.10"),
    ):
        if _absent(package):
            yield MachineProblem(f"the package {package} is not installed: {remedy}")


def optional_package_problems(config: DictConfig) -> Iterator[str]:
    """Packages that settings need, each with all settings that need it."""
    needs: dict[tuple[str, str], list[str]] = {}
    for key, package, remedy in _needed(config):
        value = OmegaConf.select(config, key)
        word = str(value).lower() if isinstance(value, bool) else value
        needs.setdefault((package, remedy), []).append(f"{key}={word}")
    for (package, remedy), settings in needs.items():
        if _absent(package):
            yield MachineProblem(f"{', '.join(settings)}: the package {package} is not installed; {remedy}")


def _needed(config: DictConfig) -> Iterator[tuple[str, str, str]]:
    """Key, package and remedy of every setting that needs one."""
    yield from ((need.key, need.package, need.remedy) for need in NEEDS if need.of(config))
    optimizer = f"{_ACTOR}.optim.optimizer_impl"
    if module := OmegaConf.select(config, optimizer):
        yield optimizer, module.partition(".")[0], "install it, or set the key to torch.optim"
    # A model with gated delta nets has code of its own, but not for a sequence that is spread over ranks.
    for ulysses in (f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"):
        spread = OmegaConf.select(config, ulysses) > 1
        if spread and "qwen3_5" in str(inputs.read_model_config(config).get("model_type")):
            yield ulysses, "fla", "pip install flash-linear-attention, or set it to 1"


def _absent(package: str) -> bool:
    return importlib.util.find_spec(package) is None
