"""Each departure of recipe.runner.cpu.patches is still needed.

A failure of what is "still" so is good news: the package underneath has changed, and the patch can go. That the patches
mend it the starts of tests/e2e show, each of which has all of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import subprocess
import sys

import pytest
import torch
from torch.distributed.distributed_c10d import Backend, BackendConfig
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from recipe.runner.cpu import patches

pytestmark = pytest.mark.slow


def test_verl_is_still_slow_and_the_patch_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.utils.torch_functional as functional

    calls, logsumexp = list[object](), torch.logsumexp
    monkeypatch.setattr(torch, "logsumexp", lambda *args, **kwargs: calls.append(args) or logsumexp(*args, **kwargs))
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(50, 8, generator=generator).requires_grad_()
    labels_T = torch.randint(8, (50,), generator=generator)

    def run() -> tuple[torch.Tensor, torch.Tensor, int]:
        calls.clear()
        value_T = functional.logprobs_from_logits_v2(logits_TV, labels_T)
        return value_T, torch.autograd.grad(value_T.sin().sum(), logits_TV)[0], len(calls)

    verls = inspect.unwrap(functional.logprobs_from_logits_v2)  # the import of a worker patches it, too
    monkeypatch.setattr(functional, "logprobs_from_logits_v2", verls)
    *before, calls_before = run()
    monkeypatch.setattr(patches, "_LOGITS_AT_ONCE", 100)  # 12 rows at a time
    patches.log_probs_of_many_tokens_at_once()
    *after, calls_after = run()
    assert (calls_before, calls_after) == (50, 5)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert functional.logprobs_from_logits_v2(logits_TV.bfloat16(), labels_T).shape == (50,)


def test_vllm_still_replaces_packed_weights() -> None:
    import vllm.model_executor.layers.utils as utils
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    layer = torch.nn.Linear(32, 32, bias=False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.shape != (32, 32)
    experts = torch.nn.Module()
    experts.activation = "silu"
    experts.w13_weight = weight = torch.nn.Parameter(torch.randn(2, 128, 64).bfloat16(), requires_grad=False)
    experts.w2_weight = torch.nn.Parameter(torch.randn(2, 64, 64).bfloat16(), requires_grad=False)
    packs, _ = CPUFusedMOE.check_grouped_gemm(None, experts)  # where the CPU has AMX or AVX-512
    CPUFusedMOE(experts)
    assert experts.w13_weight is not weight or not packs


def test_torch_still_refuses_a_repeated_device() -> None:
    with pytest.raises(ValueError, match="Duplicate device"):
        BackendConfig(Backend("cpu:gloo,cpu:gloo"))


@pytest.mark.usefixtures("one_rank")
def test_fsdp2_still_cannot_pin_without_an_accelerator() -> None:
    def forward(pin: bool) -> None:
        layer = torch.nn.Linear(4, 4)
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=pin))
        layer(torch.ones(1, 4))

    forward(False)
    with pytest.raises(RuntimeError, match=r"(?i)pin|accelerator"):
        forward(True)


def test_verl_still_needs_the_version_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("verl.third_party.vllm")
    monkeypatch.setattr(importlib.metadata, "version", inspect.unwrap(importlib.metadata.version))
    with pytest.raises(ValueError, match="vllm"):
        importlib.reload(module)


def test_setproctitle_still_loses_its_place() -> None:
    code = """
import os
environment = dict(os.environ)
os.environ.clear()  # as a process of the fork server takes over another one's
os.environ.update(environment, ANOTHER="variable")
import setproctitle
setproctitle.setproctitle("VLLM::EngineCore")
print(open("/proc/self/cmdline").read().partition("\\0")[0])
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    assert done.stdout.strip() == sys.executable
