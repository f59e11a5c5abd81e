"""What a run of ours changes in verl and torch is changed in its processes, and in no others.

What the changes do is tested in test_packs.py, test_frames.py and test_sockets.py, that they are needed in
test_upstream.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Says of each name whether what it stands for is of ours.
OURS = """
import sys, verl.trainer.main_ppo, verl.trainer.ppo.v1.trainer_base
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender
changed = (
    sys.modules["torch.distributed.rendezvous"].TCPStore,
    BucketedWeightReceiver.__init__, BucketedWeightSender.__init__,
    verl.trainer.main_ppo.pprint, verl.trainer.ppo.v1.trainer_base.Tracking,
)
print(*(getattr(value, "__globals__", {}).get("__name__", "").startswith("recipe.runner") for value in changed))
"""


@pytest.mark.slow  # two fresh processes that import verl's trainer
@pytest.mark.parametrize("run_id", ["", "1-test"])
def test_verl_is_changed_in_a_run_of_ours_only(run_id: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("FSPO_RUN_ID", "FSPO_AUDIT")}
    environment |= {"FSPO_RUN_ID": run_id} if run_id else {}
    command = [sys.executable, "-W", "ignore", "-c", OURS]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == [" ".join([str(bool(run_id))] * 5)], done.stderr[-2000:]
