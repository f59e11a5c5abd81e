"""One batch of the demo's model for a worker, in a process of its own whose argument is a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from batches import PROMPT, batch_of

from recipe.fspo.job import compose
from recipe.runner.launch.machine import export_platform

SEQUENCES, MINI_BATCH, LONGEST = 16, 8, 40
FOLDER = Path(sys.argv[1])
CONFIG = compose(
    [
        "experiment=demo",
        f"run.dir={FOLDER}",
        "actor_rollout_ref.actor.optim.total_training_steps=1",
        "actor_rollout_ref.model.external_lib=recipe.runner.cpu.engine",
    ]
)
export_platform(CONFIG)  # before verl is imported

from tensordict import TensorDict  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.utils.padding import response_from_nested  # noqa: E402

from recipe.fspo.recorder import ROWS  # noqa: E402


def batch(worker: Any) -> TensorDict:
    """pi_old is the policy itself, moved a little, so that ratios mean something."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=generator).tolist()
    data = batch_of([torch.randint(4, 16, (PROMPT + length,), generator=generator) for length in lengths])
    question = data.clone()
    tu.assign_non_tensor(question, calculate_entropy=False, compute_loss=False, temperature=1.0)
    log_probs = response_from_nested(worker.compute_log_prob(question)["log_probs"], data["response_mask"])
    rows = [row + 0.02 * torch.randn(len(row), generator=generator) for row in log_probs.unbind()]
    data["old_log_probs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    numbers = [torch.tensor([row]) for row in range(SEQUENCES)]
    data[ROWS] = torch.nested.as_nested_tensor(numbers, layout=torch.jagged)
    size = {"global_batch_size": MINI_BATCH, "mini_batch_size": MINI_BATCH, "epochs": 1, "seed": 1}
    tu.assign_non_tensor(data, calculate_entropy=False, temperature=1.0, dataloader_kwargs={"shuffle": False}, **size)
    return data
