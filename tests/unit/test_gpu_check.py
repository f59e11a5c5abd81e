"""The first GPU hour, as far as a CPU goes: its steps measure, and see what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from composing import composed

from benchmarks.gpu_check import stack

ROOT = Path(__file__).resolve().parents[2]
#: What the first two steps must not need; None makes its import fail.
NOT_NEEDED = ("verl", "ray", "vllm", "hydra", "omegaconf", "datasets", "pandas", "pyarrow", "matplotlib", "tensordict")


@pytest.mark.slow
def test_the_first_two_steps_measure_with_torch_alone() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED}));"
        "import json, torch; torch.set_num_threads(1); from benchmarks.gpu_check import __main__, steps;"
        "print(json.dumps({n: getattr(steps, n)(steps.SIZES['cpu'], 'cpu') for n in ('versions', 'noise')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert "flash-attn" not in numbers["versions"] and numbers["versions"]["torch"] == version("torch")
    assert float(numbers["noise"]["bfloat16, two shapes: S / sqrt(L), rms"]) > 0
    assert numbers["noise"]["bfloat16, one shape: half-width of FSPO's band over it"] != 0


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_the_steps_start_composes(gpus: int) -> None:
    assert composed(*stack.SHAPED_ON_A_CPU).actor_rollout_ref.actor.fsdp_config.param_offload
    smoke = composed(*stack.SMOKE, f"trainer.n_gpus_per_node={gpus}").actor_rollout_ref
    assert smoke.rollout.tensor_model_parallel_size == smoke.actor.ulysses_sequence_parallel_size == gpus
    bucket = smoke.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    assert 4 * stack.WIDE[0] * stack.WIDE[1] > bucket, "the way of weights larger than a bucket is not taken"
    for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        assert composed(*stack.LEARN, *stack.PRECISIONS[name]).actor_rollout_ref.rollout.dtype == dtype


@pytest.mark.slow
def test_a_step_that_breaks_leaves_its_reason_and_the_next_one_runs(tmp_path: Path) -> None:
    arguments = ["--device", "cuda", "--out", str(tmp_path), "--steps", "versions", "noise"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", *arguments], cwd=ROOT, capture_output=True)
    assert done.returncode == 1
    rows = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert {step: row["verdict"] for step, row in rows.items()} == {"versions": "failed", "noise": "failed"}
    assert "runs no kernel" in rows["versions"]["reason"] and "torch sees no GPU" in rows["noise"]["reason"]
    assert "torch" in rows["versions"]["numbers"]
