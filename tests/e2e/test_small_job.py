"""The 8B job's configuration trains in every mode, made small by ``conf/experiment/qwen3_8b_small.yaml``.

Nothing else runs that configuration without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_stack import Starter

from recipe.runner.checkpoints.integrity import latest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

_CONF = Path(__file__).parent / "conf"


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_the_8b_job_trains_small(start: Starter, tmp_path: Path, mode: str) -> None:
    run = start(tmp_path / "run", f"hydra.searchpath=[{_CONF}]", "experiment=qwen3_8b_small", f"mode={mode}")
    assert run.wait(1100) == 0, run.output()[-4000:]
    assert [step for step in run.steps() if step] == [1, 2]
    assert any(metrics["actor/grad_norm"] for metrics in run.steps().values() if "actor/grad_norm" in metrics)
    assert latest(run.run_dir / "checkpoints")
    # No default of the job is to be warned of.
    for setting in ("clip_grad", "band", "drift"):
        assert not [line for line in run.output().splitlines() if "warning:" in line and setting in line]
