"""The rehearsal of the GPU jobs passes in every mode where neither their data nor their models are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_stack import user_environment

from fspo.records import METRICS_FILE, numbered_steps
from recipe.runner.checkpoints.integrity import latest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("job", "gpus"),
    [
        ("experiment=gsm8k_0_5b nodes=1 gpus=1", 1),
        ("experiment=qwen3_8b nodes=2 gpus=8", 16),
        ("experiment=qwen3_1_7b nodes=1 gpus=4 mode=colocate_async", 4),
        ("experiment=qwen3_8b nodes=2 gpus=8 mode=colocate_async", 16),
        ("experiment=qwen3_8b nodes=1 gpus=8 mode=separate_async", 16),
        ("experiment=qwen3_1_7b nodes=2 gpus=4 mode=separate_async", 12),
    ],
)
def test_the_job_is_rehearsed(job: str, gpus: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipe.fspo.rehearse", *job.split(), "substitute=data,model"]
    environment = user_environment() | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"the checks pass: {gpus} GPUs" in done.stdout
    folder = re.search(r"^two steps on CPUs, in (/\S+)$", done.stdout, re.M)
    assert folder
    assert [line["step"] for _, line in numbered_steps(Path(folder[1], "run", METRICS_FILE)) if line["step"]] == [1, 2]
    assert latest(Path(folder[1], "run/checkpoints"))
    # A random model rightly warns of cut responses and equal rewards, but no default of ours is to be warned of.
    for setting in ("clip_grad", "band", "drift"):
        assert not [line for line in done.stdout.splitlines() if "warning:" in line and setting in line]
    # The made-up tokenizer's turns end with another token than its eos.
    assert "'<|im_end|>' (" in (printed := done.stdout + done.stderr) and "is added to" in printed
    assert os.listdir(tmp_path) == []  # nothing beside it, such as the job's own run folder
    shutil.rmtree(folder[1])
