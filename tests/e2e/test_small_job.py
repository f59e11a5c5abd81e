"""The 8B job's configuration trains, made small by ``conf/experiment/qwen3_8b_small.yaml``.

Nothing else runs that configuration without a GPU. Its modes are in test_async.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from columns import all_rows
from real_stack import HERE, LATER, Starter, latest_step

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * LATER)]


def test_the_8b_job_trains_small(start: Starter, tmp_path: Path) -> None:
    run = start(tmp_path, f"--config-dir={HERE}/conf", "experiment=qwen3_8b_small")
    run.ends_with(0)
    steps = {step: metrics for step, metrics in run.steps().items() if step}  # it validates before its first
    assert sorted(steps) == [1, 2] and any(metrics["actor/grad_norm"] for metrics in steps.values())
    assert latest_step(tmp_path) == 2
    # 16 prompts x 4 responses, in four mini-batches
    assert all_rows(tmp_path).groupby(["step", "update"]).size().tolist() == [16] * 8
    # No default of the job is to be warned of.
    warnings = [line for line in run.output().splitlines() if "warning:" in line]
    assert [line for line in warnings if any(word in line for word in ("clip_grad", "band", "drift"))] == []
