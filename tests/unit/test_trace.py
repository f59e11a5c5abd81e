"""The memory trace: the planner within 5% of what verl's engine allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_trace
import pytest


def traced(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", engine_trace.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    trace: dict[str, Any] = json.loads(done.stdout)
    return trace


def assert_planner_agrees(trace: dict[str, Any]) -> None:
    assert set(trace["phases"]) == {"log_probs", "update"}
    assert trace["planner"] == pytest.approx(trace["phases"], rel=0.05)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("experiment", ["qwen3_8b", "qwen3_1_7b"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_planner_is_within_five_percent(experiment: str, nodes: int) -> None:
    assert_planner_agrees(traced(f"experiment={experiment}", f"nodes={nodes}", "gpus=8"))


@pytest.mark.slow  # twelve CPU seconds of imports
@pytest.mark.parametrize("tied", [False, True])
def test_a_small_model(tmp_path: Path, tied: bool) -> None:
    """Little vocabulary, so that a layer decides, where the job has the output head; Ulysses; a gradient to reduce."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "head_dim": 64, "vocab_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 32768}
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads | kind), encoding="utf-8")
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    assert_planner_agrees(traced("experiment=qwen3_8b", f"model_config={tmp_path}", ulysses))
