"""Gradient alignment of a real checkpoint: gradients through FSDP, rollouts from vLLM, a folder left as it was."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_stack import MARK, SMALL, Start, Starter, marked_processes, user_environment

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


def measure(run: Path, *arguments: str, mark: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.alignment", str(run), *arguments]
    environment = {**user_environment(), MARK: mark}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=ROOT)


def files_of(run: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(run)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in run.rglob("*")
        if path.is_file() and path.relative_to(run).parts[0] != "alignment" and path.name != "stdout.log"
    }


@pytest.fixture(scope="module")
def trained(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Two steps and a checkpoint."""
    run = start(tmp_path_factory.mktemp("run"), *SMALL, "trainer.save_freq=2")
    assert run.wait(400) == 0, run.output()[-4000:]
    return run


def test_alignment_of_a_checkpoint(trained: Start) -> None:
    run = trained.run_dir
    before = files_of(run)

    arguments = ("algos=[fspo,gspo]", "prompts=8", "updates=2", "bins=3", "folds=4", "rounds=2")
    done = measure(run, *arguments, mark=trained.mark)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert files_of(run) == before
    assert marked_processes(trained.mark) == []

    result = json.loads((run / "alignment" / "alignment.json").read_text())
    assert [(o["algo"], o["clips"]) for o in result["objectives"]] == [
        (algo, clips) for algo in ("fspo", "gspo") for clips in ("default", "matched", "matched_active")
    ]
    assert all(entry["sequences"] == 64 for entry in result["rounds"])
    assert all(entry["std_S_over_sqrt_L"] > 0 for entry in result["rounds"])  # the updates moved the policy
    for entry in result["objectives"]:
        figures = {name: figure["rounds"] for name, figure in entry["figures"].items()}
        # None where everything was clipped, or no group had unequal rewards.
        assert all(cosine is None or -1 <= cosine <= 1 + 1e-9 for cosine in figures["cosine"])
        if entry["clips"] == "matched":
            assert all(rate >= 0.85 - 1e-9 for rate in figures["symmetric/acceptance"])
        if entry["clips"] == "matched_active":
            assert all(rate >= 0.85 - 1e-9 for rate in figures["active/acceptance"])
    assert "cos(clipped, own unclipped)" in done.stdout


def test_gradients_add_up(trained: Start) -> None:
    """Measured through the engine in different splits: what no band clips must be the sum of the unclipped cells."""
    from benchmarks.alignment.report import read_rounds

    arguments = ("algos=[rloo]", "prompts=8", "bins=3", "folds=2", "target_clip_rate=0.001")
    done = measure(trained.run_dir, *arguments, mark=trained.mark)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (measured,) = read_rounds(trained.run_dir / "alignment", 1)
    unclipped_FJKD, clipped_OJKD, held_out_HD = measured.plan.split(measured.vectors_VD)
    matched_JKD = clipped_OJKD[1]  # fewer than one of 64 sequences lies outside its band: none
    assert measured.accepted_OVB[1].all()
    difference = np.linalg.norm(matched_JKD - unclipped_FJKD[0], axis=-1)
    scale = np.linalg.norm(unclipped_FJKD[0], axis=-1)
    assert difference.max() <= 1e-5 * scale.max(), (difference, scale)  # a cell whose groups have equal rewards is 0
    assert math.isfinite(float(np.linalg.norm(held_out_HD)))
