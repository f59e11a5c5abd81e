"""What the GPU job asks of vLLM's CUDA build, and of verl's engine with flash-attn, packing and Ulysses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cuda_contract
import pytest

WHEELS = os.environ.get("FSPO_WHEELS", "")


@pytest.mark.slow  # seventeen CPU seconds
def test_packing_ulysses_and_untied_weights_on_two_ranks(tmp_path: Path) -> None:
    """verl's engine loads what the checkpoint holds, and gives the log-probs and gradients of each sequence alone."""
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same weights, log-probs and gradients") == 2


def contract(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", cuda_contract.__file__, f"wheels={WHEELS}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.skipif(not WHEELS, reason="vLLM's CUDA wheel is not here: make test-gpu-contract")
@pytest.mark.parametrize(
    ("experiment", "parallel", "sequences", "runner"),
    [("qwen3_8b", 2, 700, "V2"), ("qwen3_1_7b", 1, 320, "V2"), ("qwen3_8b", 2, 700, "V1")],
)
def test_vllm_takes_the_jobs_arguments(experiment: str, parallel: int, sequences: int, runner: str) -> None:
    fallback = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if runner == "V1" else {}
    done = contract(f"experiment={experiment}", "nodes=2", "gpus=8", **fallback)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {
        "model runner": runner,
        "async scheduling": True,
        "cudagraph mode": "FULL_AND_PIECEWISE",
        "dtype": "bfloat16",
        "max_model_len": 10240,
        "max_num_seqs": sequences,
        "tensor parallel": parallel,
        "sleep mode": True,
        "logprobs mode": "processed_logprobs",
    }
    chosen = json.loads(done.stdout)
    assert chosen | expected == chosen


@pytest.mark.skipif(not WHEELS, reason="vLLM's CUDA wheel is not here: make test-gpu-contract")
@pytest.mark.parametrize(
    ("experiment", "architecture", "runner"),
    [("gsm8k_0_5b", "Qwen2ForCausalLM", "V1"), ("gsm8k_0_6b", "Qwen3ForCausalLM", "V2")],
)
def test_which_model_runner_the_first_jobs_get(experiment: str, architecture: str, runner: str) -> None:
    """docs/clusters.md says what a run of the first does not show of the 8B job's."""
    done = contract(f"experiment={experiment}", "nodes=1", "gpus=1")
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {"architecture": architecture, "model runner": runner, "tensor parallel": 1, "max_model_len": 1536}
    chosen = json.loads(done.stdout)
    assert chosen | expected == chosen


@pytest.mark.skipif(not WHEELS, reason="vLLM's CUDA wheel is not here: make test-gpu-contract")
@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
@pytest.mark.parametrize(
    "job", ["qwen3_8b nodes=1 gpus=8", "qwen3_8b nodes=2 gpus=8", "gsm8k_0_5b nodes=1 gpus=1"], ids=lambda job: job
)
def test_vllm_takes_the_arguments_of_every_mode(job: str, mode: str) -> None:
    done = contract(*f"experiment={job} mode={mode}".split())
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not WHEELS, reason="vLLM's CUDA wheel is not here: make test-gpu-contract")
def test_an_argument_that_vllm_does_not_know_is_named() -> None:
    done = contract("experiment=qwen3_8b", "+actor_rollout_ref.rollout.engine_kwargs.vllm.no_such_argument=1")
    assert done.returncode != 0
    assert "no-such-argument" in done.stderr or "no_such_argument" in done.stderr
