"""What a fresh process imports, and what it must not: light commands, verl with our plugin, a run on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.fspo import plugin


def fresh(code: str, **environment: str) -> None:
    """Run code in a process of its own, outside the checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=Path.home(), env={**inherited, **environment}, timeout=200
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


#: In this order, because each part may import more than the one before. verl above all: it fixes its platform while it
#: is imported, and a command decides about the platform first.
LIGHT = """
import contextlib, importlib, io, pkgutil, sys

def absent(*packages):
    found = set(packages) & {name.split(".")[0] for name in sys.modules}
    assert not found, found

def modules_of(package, *without):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.startswith(without) and not module.name.endswith("__main__"):
            yield module.name

import recipe.fspo.reward
recipe.fspo.reward.compute_score("aime24", r"\\boxed{1}", "1")
absent("math_verify", "sympy", "torch", "verl", "ray", "transformers", "datasets")

heavy = "fspo.report", "fspo.data.demo_model", "fspo.data.char_tokenizer", "fspo.data.smollm2"
for name in modules_of("fspo", *heavy):
    importlib.import_module(name)
absent("verl", "ray", "vllm", "hydra", "omegaconf", "transformers", "matplotlib")
for name in modules_of("fspo.report"):
    importlib.import_module(name)
absent("verl", "ray", "vllm", "hydra", "omegaconf", "transformers")

import recipe.fspo.alignment.__main__, recipe.fspo.compare.__main__, recipe.fspo.main, recipe.fspo.plan.__main__
with contextlib.redirect_stdout(io.StringIO()):
    assert recipe.fspo.plan.__main__.main(["experiment=qwen3_8b", "json=true"]) == 0
absent("verl", "ray", "vllm", "transformers")
"""


def test_light_modules_import_nothing_heavy() -> None:
    fresh(LIGHT)


def test_verl_finds_the_losses_and_the_platform() -> None:
    fresh(
        "import sys, verl\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY\n"
        "from fspo.losses import ALGORITHMS\n"
        "assert set(ALGORITHMS) <= set(POLICY_LOSS_REGISTRY), sorted(POLICY_LOSS_REGISTRY)\n"
        "assert 'cpu' in PlatformRegistry.registered_names()\n"
        "assert 'vllm' not in sys.modules, 'the plugin must not make every process load vLLM'\n"
        "from recipe.fspo.plugin import require_plugin; require_plugin()\n",
        VERL_PLATFORM="cpu",
    )


def test_a_gpu_run_imports_nothing_of_cpus() -> None:
    fresh(
        "import sys, verl, recipe.fspo.worker\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "assert 'cpu' not in PlatformRegistry.registered_names()\n"
        "found = [name for name in sys.modules if name.startswith('recipe.fspo.cpu')]\n"
        "assert not found, found\n"
    )


def test_a_missing_plugin_is_said_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_loaded", False)
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    with pytest.raises(RuntimeError, match="VERL_USE_EXTERNAL_PLUGINS='none'"):
        plugin.require_plugin()
