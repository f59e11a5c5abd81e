"""Checks what a job would tell the locked CUDA build of vLLM, without a GPU.

usage: python tests/unit/cuda_contract.py wheels=FOLDER experiment=qwen3_8b nodes=2 gpus=8 [any override]

FOLDER holds the wheel of vLLM for a machine with GPUs (`make test-gpu-contract` downloads it); one of transformers
there takes the place of the installed package, too. They are unpacked into a temporary folder. The compiled parts of
vLLM are replaced by modules that do nothing, and its platform says that it is an H100. Then verl's own vLLM server
turns the job's configuration into vLLM's arguments, vLLM parses them and builds its engine's configuration; there it
ends. Not shown: kernels, memory, and whatever happens after that configuration.

Prints one JSON object, what vLLM has chosen; or ends with the error that verl or vLLM raise. Needs a process of its
own: the CUDA and the CPU build of vLLM share a name.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.machinery
import json
import sys
import tempfile
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

from engine_trace import print_json
from omegaconf import DictConfig, OmegaConf

from recipe.runner.plan.model import read_architecture

#: Bytes that the pretended GPU has.
_MEMORY: Final = 80 * 2**30


def contract(config: DictConfig, wheels: Path) -> dict[str, Any]:
    """The object that the command prints, for a composed configuration and a folder of wheels."""
    fields, _ = read_architecture(config.actor_rollout_ref.model.path)
    with tempfile.TemporaryDirectory() as folder:
        files = [*wheels.glob("vllm-*.whl"), *wheels.glob("transformers-*.whl")]
        compiled = [name for file in files for name in _unpack(file, folder)]
        sys.path.insert(0, folder)
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        _pretend_compiled_parts(compiled)
        _pretend_h100()
        return _chosen(_engine_config(config, str(model)))


class _NoKernels(types.ModuleType):
    """A compiled module without its functions: whatever is asked of it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _unpack(wheel: Path, folder: str) -> list[str]:
    """Unpack all but the compiled modules, and return their names."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder, [name for name in names if not name.endswith(".so")])
    compiled = [Path(name) for name in names if name.endswith(".so")]
    return [".".join([*path.parent.parts, path.name.partition(".")[0]]) for path in compiled]


def _pretend_compiled_parts(names: Sequence[str]) -> None:
    for name in names:
        module = _NoKernels(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module


def _pretend_h100() -> None:
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return _MEMORY

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def log_warnings(cls) -> None:
            pass

        def is_cumem_allocator_available(self) -> bool:
            return True

    vllm.platforms._current_platform = H100()
    import vllm._custom_ops
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True  # a GPU machine has it
    for name in dir(vllm._custom_ops):
        if "support" in name:  # asked while modules are imported
            setattr(vllm._custom_ops, name, lambda *_, **__: False)
    torch.cuda.device_count = torch.accelerator.device_count = lambda: 8


class _Built(Exception):
    """Carries the engine's configuration out of verl's server."""


def _engine_config(config: DictConfig, model: str) -> Any:
    """The configuration with which verl's server would start vLLM's engine."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    everything = copy.deepcopy(config.actor_rollout_ref)
    OmegaConf.set_struct(everything, False)
    everything.model.update(path=model, hf_config_path=None, tokenizer_path=None, load_tokenizer=False)

    class Server(vllm_async_server.vLLMHttpServer):
        def __init__(self) -> None:  # verl's asks Ray for addresses and ports
            self.config = omega_conf_to_dataclass(everything.rollout)
            self.model_config = omega_conf_to_dataclass(everything.model)
            self.replica_rank = self.node_rank = 0
            self.nnodes, self.gpus_per_node = 1, config.trainer.n_gpus_per_node
            self.workers = []
            self._disaggregation_role = "null"
            self._dp_master_port = 0
            self._validate_configs()

        def _should_profile(self) -> bool:
            return False

    def built(vllm_config: Any, **_: Any) -> Any:
        raise _Built(vllm_config)

    with mock.patch.object(vllm_async_server.AsyncLLM, "from_vllm_config", built):
        try:
            asyncio.run(Server().launch_server())
        except _Built as carrier:
            return carrier.args[0]
    raise RuntimeError("verl's server built no engine")


def _chosen(engine: Any) -> dict[str, Any]:
    return {
        "architecture": engine.model_config.architectures[0],
        "model runner": "V2" if engine.use_v2_model_runner else "V1",
        "async scheduling": bool(engine.scheduler_config.async_scheduling),
        "cudagraph mode": engine.compilation_config.cudagraph_mode.name,
        "largest captured batch": engine.compilation_config.max_cudagraph_capture_size,
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "max_model_len": engine.model_config.max_model_len,
        "max_num_seqs": engine.scheduler_config.max_num_seqs,
        "tensor parallel": engine.parallel_config.tensor_parallel_size,
        "executor": str(engine.parallel_config.distributed_executor_backend),
        "sleep mode": bool(engine.model_config.enable_sleep_mode),
        "logprobs mode": str(engine.model_config.logprobs_mode),
    }


if __name__ == "__main__":
    print_json(["wheels"], lambda config, own: contract(config, Path(own["wheels"])))
