"""``python same_gradient.py FOLDER``: one update by the plain worker, with all rows and with padding in place of some.

A process of its own, run by test_zero_advantage.py, for verl's engine on CPUs. Prints, for each loss of a few, whether
the gradients of both mini-batches are equal bit for bit where packs are equal (one row each), and how far apart they
are where packs hold several.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from composing import here
from same_update import CONFIG, MINI_BATCH, SEQUENCES, batch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from fspo.types import BandState
from recipe.fspo.rollout_batch import read_outcomes
from recipe.fspo.worker import FSPOWorker, RecordingTrainingWorker
from recipe.fspo.zero_advantage import Padding, equal_rewards


class KeepingWorker(RecordingTrainingWorker):
    """Keeps the gradient of each mini-batch and what verl divides by, and moves no weight."""

    def reset(self) -> None:
        super().reset()
        self.gradients: list[torch.Tensor] = []

        def keep() -> float:
            whole = [parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None]
            whole = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in whole]
            self.gradients.append(torch.cat([part.detach().flatten() for part in whole]).clone())
            return float(self.gradients[-1].norm())

        self.engine.optimizer_step = keep


class Worker(FSPOWorker):
    actor_worker_cls = KeepingWorker


def reduced(data: TensorDict, queue: Any) -> TensorDict:
    """As the trainer makes it: the rows go through the queue."""
    from transfer_queue import KVBatchMeta

    names = [name for name in [*data.keys()] if torch.is_tensor(data[name])]
    rows = {name: data[name].unbind() for name in names}
    meta = KVBatchMeta([f"{i // 2}_{i % 2}_0" for i in range(SEQUENCES)], [{}] * SEQUENCES, "train")
    for index, key in enumerate(meta.keys):
        length = len(rows["responses"][index])
        # The second half of the first mini-batch, and all of the second.
        equal = index >= MINI_BATCH // 2
        scores = torch.zeros(length)
        scores[-1] = 0.7 if equal else index % 2
        queue.rows[key] = {name: rows[name][index] for name in names} | {"rm_scores": scores}
        queue.rows[key] |= {"extra_fields": {}, "data_source": "math"}
        meta.tags[index] = {"response_len": length, "seq_len": 0}
    outcomes, padding = read_outcomes(meta), Padding()
    padding.choose(meta, equal_rewards(outcomes))
    padding.put(meta, outcomes, 3)
    for key in padding.stand_ins.values():
        queue.rows[key] |= {"advantages": torch.zeros(1), "old_log_probs": torch.zeros(1)}
    got = queue.kv_batch_get(padding.in_place(meta).keys, "train", names)
    return got.to_tensordict()


def main() -> None:
    from queue_in_memory import Queue

    from recipe.fspo import rollout_batch, zero_advantage

    queue = rollout_batch.tq = zero_advantage.tq = Queue()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    worker = Worker(config=here(CONFIG).actor_rollout_ref, role="actor")
    worker.init_model()
    whole = batch(worker)
    lengths = whole["responses"].offsets().diff().tolist()
    advantage = [(1.0 if i % 2 else -1.0) * (i < MINI_BATCH // 2) for i in range(SEQUENCES)]
    rows = [torch.full((length,), value) for length, value in zip(lengths, advantage, strict=True)]
    whole["advantages"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    some = reduced(whole, queue)
    settings = {name: tu.get(whole, name) for name in [*whole.keys()] if not torch.is_tensor(whole[name])}
    tu.assign_non_tensor(some, **settings)
    worker.begin_run(sys.argv[1])
    policy_loss = worker.actor.loss_fn
    while "config" not in getattr(policy_loss, "keywords", {}):
        policy_loss = policy_loss.args[0]
    config = policy_loss.keywords["config"]
    for loss, mode in (("fspo", "token-mean"), ("vanilla", "token-mean"), ("vanilla", "seq-mean-token-mean")):
        object.__setattr__(config.policy_loss, "loss_mode", loss)
        object.__setattr__(config, "loss_agg_mode", mode)
        for alone in (True, False):
            gradients, records = [], []
            for data in (whole, some):
                data = data.clone()
                tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1 if alone else MINI_BATCH)
                worker.actor.gradients.clear()
                worker.begin_update(BandState(clip_scale=3.0), 3, loss_scale=0.1)
                worker.update_actor(data)
                gradients.append([gradient.clone() for gradient in worker.actor.gradients])
                records.append([int((part.rows["L"] > 0).sum()) for part in worker.pop_mini_batches()])
            largest = float(gradients[0][0].abs().max())
            print(
                json.dumps(
                    {
                        "loss": f"{loss} {mode}",
                        "alone": alone,
                        "equal": all(one.equal(other) for one, other in zip(*gradients, strict=True)),
                        "off": max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True)) / largest,
                        "largest": largest,
                        "second": float(gradients[1][1].abs().max()),
                        "rows": records,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
    os._exit(0)
