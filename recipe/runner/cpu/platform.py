"""verl's platform for CPUs, by its public hook (``PlatformRegistry``).

Ray hands out *logical* GPUs (``ray_init.num_gpus`` = number of ranks), so that verl's placement stays as it is.
"""

from __future__ import annotations

import contextlib
import resource
import types
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for calls that only concern an accelerator (caches, IPC, streams)."""


def _build_device_module() -> types.ModuleType:
    """``torch.cpu`` plus the functions that verl expects of a device module and that ``torch.cpu`` lacks."""
    module = types.ModuleType("recipe.runner.cpu.device_module", "Device namespace handed to verl on CPUs.")
    vars(module).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "synchronize"):
        setattr(module, name, _nothing)
    # Memory in bytes: resident of this process, its peak (KiB on Linux), and of the machine (available, total).
    for name in ("memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *_: psutil.Process().memory_info().rss)
        setattr(module, f"max_{name}", lambda *_: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    module.mem_get_info = lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total)
    # A key of verl's FLOPs table (verl.utils.flops_counter), so that utilisation figures have a denominator.
    module.get_device_name = lambda *_: "CPU"
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """CPU backend for verl: gloo collectives, no streams, shared memory instead of device IPC."""

    device_name = vendor_name = "cpu"
    device_module = _build_device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        # verl passes this to Tensor.to() and to FSDP, where an index would name an accelerator.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
