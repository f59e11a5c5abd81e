"""``python same_update.py FOLDER``: one batch, an update with it by the plain worker and by the runner's.

A process of its own, run by test_worker.py: importing the runner's worker changes what verl computes with on CPUs, so
the plain one goes first. Prints a JSON object for each: losses, gradient norms, change of the weights, rows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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

from fspo.types import BandState  # noqa: E402
from recipe.fspo.recorder import ROWS, join_ranks  # noqa: E402
from recipe.runner.launch.prepare import on_this_machine  # noqa: E402


def weights(worker: Any) -> torch.Tensor:
    parts = [parameter.detach() for parameter in worker.actor.engine.module.parameters()]
    whole = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]
    return torch.cat([part.to(torch.float64).flatten() for part in whole])


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


def updated(worker: Any, data: TensorDict) -> dict[str, Any]:
    """What an update with this batch is, of a worker that has made none."""
    before = weights(worker)
    worker.begin_update(BandState(clip_scale=3.0), 3, loss_scale=0.1)
    metrics = worker.update_actor(data.clone())["metrics"]
    mini_batches = join_ranks([worker.pop_mini_batches()])
    return {
        "losses": metrics["actor/pg_loss"],
        "norms": [part.grad_norm for part in mini_batches],
        "change": (weights(worker) - before).tolist(),
        "rows": [{name: column.tolist() for name, column in part.rows.items()} for part in mini_batches],
    }


def main() -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = on_this_machine(CONFIG).actor_rollout_ref
    from recipe.fspo.worker import FSPOWorker

    plain = FSPOWorker(config=config, role="actor")
    plain.init_model()
    data = batch(plain)
    plain.record()
    print(json.dumps(updated(plain, data)), flush=True)
    assert not [name for name in sys.modules if name.startswith("recipe.fspo.in_runner")]
    from recipe.fspo.in_runner.worker import RunWorker

    of_run = RunWorker(config=config, role="actor")
    of_run.init_model()
    of_run.record()
    of_run.begin_run(str(FOLDER))
    print(json.dumps(updated(of_run, data)), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # two engines of one process group do not end well
