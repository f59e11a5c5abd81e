"""What the GPU job asks of vLLM's CUDA build, and of verl's engine with flash-attn, packing and Ulysses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_contract
import pytest

WHEELS = os.environ.get("FSPO_WHEELS", "")


def test_without_the_wheel_nothing_is_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_contract.main([f"wheels={tmp_path}", "experiment=qwen3_8b"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "not checked"
    assert "has no wheel of vllm 0.24.0: make test-gpu-contract" in found["says"]


def test_a_damaged_wheel_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / f"vllm-{cuda_contract._pinned_vllm()}-any.whl"
    wheel.write_bytes(b"half of it")
    assert cuda_contract.main([f"wheels={tmp_path}", "experiment=qwen3_8b"]) == 2
    assert f"error: {wheel} is damaged" in capsys.readouterr().err


def test_the_pin_is_the_locked_one() -> None:
    lock = Path(__file__).resolve().parents[2] / "requirements" / "gpu.txt"
    assert f"\nvllm=={cuda_contract._pinned_vllm()}\n" in lock.read_text(encoding="utf-8")


def test_the_folder_has_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_contract.main(["experiment=qwen3_8b"]) == 2
    assert "wheels=FOLDER" in capsys.readouterr().err


@pytest.mark.slow  # seventeen CPU seconds
def test_packing_ulysses_and_untied_weights_on_two_ranks(tmp_path: Path) -> None:
    """verl's engine loads what the checkpoint holds, and gives the log-probs and gradients of each sequence alone."""
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same weights, log-probs and gradients") == 2


def contract(*arguments: str, **environment: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        cuda_contract.__file__,
        f"wheels={WHEELS}",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if found["status"] == "failed" else 0), done.stderr[-3000:]
    return found


@pytest.mark.skipif(not WHEELS, reason="vLLM's CUDA wheel is not here: make test-gpu-contract")
@pytest.mark.parametrize(
    ("experiment", "parallel", "runner"),
    [("qwen3_8b", 2, "V2"), ("qwen3_1_7b", 1, "V2"), ("qwen3_8b", 2, "V1")],
)
def test_vllm_takes_the_jobs_arguments(experiment: str, parallel: int, runner: str) -> None:
    fallback = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if runner == "V1" else {}
    found = contract(f"experiment={experiment}", "nodes=2", "gpus=8", **fallback)
    assert found["status"] == "passed", found["says"]
    expected = {
        "model runner": runner,
        "async scheduling": True,
        "cudagraph mode": "FULL_AND_PIECEWISE",
        "dtype": "bfloat16",
        "max_model_len": 10240,
        "max_num_seqs": 304,
        "tensor parallel": parallel,
        "sleep mode": True,
        "logprobs mode": "processed_logprobs",
    }
    assert found["engine"] | expected == found["engine"]


@pytest.mark.skipif(not WHEELS, reason="vLLM's CUDA wheel is not here: make test-gpu-contract")
def test_an_argument_that_vllm_does_not_know_is_named() -> None:
    found = contract("experiment=qwen3_8b", "+actor_rollout_ref.rollout.engine_kwargs.vllm.no_such_argument=1")
    assert found["status"] == "failed"
    assert "no-such-argument" in found["says"] or "no_such_argument" in found["says"]
