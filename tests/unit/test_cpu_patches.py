"""Each departure of recipe.runner.cpu.patches is still needed.

A failure of what is "still" so is good news: the package underneath has changed, and the patch can go. That the patches
mend it the starts of tests/e2e show, each of which has all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

import pytest

pytestmark = pytest.mark.slow


#: What is wrong with programs, in forks of a process of their own: every patch is a matter of import order.
IN_FORKS = """
import json, os, sys, tempfile, traceback
import verl
said = {}
for name, code in json.load(sys.stdin).items():
    with tempfile.TemporaryFile("w+") as file:
        if not os.fork():
            try:
                exec(code, {"__name__": "__main__"})
                os._exit(0)
            except BaseException:
                file.write(traceback.format_exc())
                file.flush()
                os._exit(1)
        status = os.wait()[1]
        file.seek(0)
        said[name] = file.read() or f"status {status}" * (status != 0)
print(json.dumps(said))
"""
PROGRAMS: Final = {
    "verl is still slow with log-probabilities, and the patch gives the same": """
import torch, verl.utils.torch_functional as functional
import recipe.runner.cpu.patches as patches
calls, original = [], torch.logsumexp
torch.logsumexp = lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs)
torch.manual_seed(0)
logits_TV = torch.randn(50, 8, requires_grad=True)
labels_T = torch.randint(8, (50,))
def run():
    calls.clear()
    value_T = functional.logprobs_from_logits_v2(logits_TV, labels_T)
    return value_T, torch.autograd.grad(value_T.sin().sum(), logits_TV)[0], len(calls)
*before, calls_before = run()
assert calls_before == 50
patches._LOGITS_AT_ONCE = 100  # 12 rows at a time
patches.log_probs_of_many_tokens_at_once()
*after, calls_after = run()
assert calls_after == 5
assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
assert functional.logprobs_from_logits_v2(logits_TV.bfloat16(), labels_T).shape == (50,)
""",
    "vLLM still replaces packed weights": """
import torch
import vllm.model_executor.layers.utils as utils
layer = torch.nn.Linear(32, 32, bias=False)
utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
assert layer.weight.shape != (32, 32)
""",
    "vLLM still replaces the weights of experts": """
import torch
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
layer = torch.nn.Module()
layer.activation = "silu"
layer.w13_weight = weight = torch.nn.Parameter(torch.randn(2, 128, 64).bfloat16(), requires_grad=False)
layer.w2_weight = torch.nn.Parameter(torch.randn(2, 64, 64).bfloat16(), requires_grad=False)
packs, _ = CPUFusedMOE.check_grouped_gemm(None, layer)  # where the CPU has AMX or AVX-512
CPUFusedMOE(layer)
assert layer.w13_weight is not weight or not packs
""",
    "torch still refuses a repeated device": """
import pytest
from torch.distributed.distributed_c10d import BackendConfig, Backend
with pytest.raises(ValueError, match="Duplicate device"):
    BackendConfig(Backend("cpu:gloo,cpu:gloo"))
""",
    "FSDP2 still cannot pin without an accelerator": """
import pytest, torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
def forward(pin):
    layer = torch.nn.Linear(4, 4)
    fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    layer(torch.ones(1, 4))
with pytest.raises(Exception, match="(?i)pin|accelerator"):
    forward(True)
forward(False)
""",
    "verl still needs the version of vLLM": """
import importlib.metadata as metadata, pytest
metadata.version = metadata.version.__wrapped__
with pytest.raises(ValueError, match="vllm"):
    import verl.third_party.vllm
""",
    "setproctitle still loses its place": """
import os, pathlib
environment = dict(os.environ)
os.environ.clear()  # as a process of the fork server takes over another one's
os.environ.update(environment, ANOTHER="variable")
import setproctitle
setproctitle.setproctitle("VLLM::EngineCore")
assert not pathlib.Path("/proc/self/cmdline").read_text().startswith("VLLM::EngineCore")
""",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    command, variables = [sys.executable, "-c", IN_FORKS], os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, input=json.dumps(PROGRAMS), env=variables, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_patch_is_still_needed(said: dict[str, str], program: str) -> None:
    assert said[program] == ""
