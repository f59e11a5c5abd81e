"""Slots of vLLM's servers for all requests that a run of an asynchronous mode sends at once.

A slot is one unfinished call to a vLLM server (a Ray actor). verl 0.9.1 gives a server ``max(1000,
max_num_seqs + 16)`` of them, for requests and for control (abort, sleep, new weights, go on). In the asynchronous modes
a request that comes while the weights change waits in its slot to be let on. Once such requests fill the slots, the
call that lets them on waits for them: the run stands still (verl issue 7990). In ``mode=sync`` no request is left then.
"""

from __future__ import annotations

import math
from typing import Final

from omegaconf import DictConfig

from recipe.runner.ranks import asynchronous_mode

#: For control calls; verl's trainers wait for each of theirs before they make the next.
CONTROL_SLOTS: Final = 64


def slots(config: DictConfig) -> int | None:
    """Slots that each server needs, for a step's responses and those in advance; None: verl's number will do."""
    # Of all servers: an aborted request returns to the one that it came from, so that their parts do not stay equal.
    # upstream: verl.workers.rollout.router "if request_id in self._request_id_to_server:"
    if (mode := asynchronous_mode(config.trainer)) is None:
        return None
    prompts = config.data.train_batch_size * (1 + config.trainer.v1[mode].num_warmup_batches)
    return math.ceil(prompts) * int(config.actor_rollout_ref.rollout.n) + CONTROL_SLOTS


def give_servers_slots(slots: int) -> None:
    """Let every server that this process starts take in ``slots`` calls at once, or verl's number if that is larger.

    verl 0.9.1's number is a property of ``RolloutReplica`` with neither a setting nor a hook.
    """
    from verl.workers.rollout.replica import RolloutReplica

    # upstream: verl.workers.rollout.replica "max(1000,"
    # upstream: verl.workers.rollout.vllm_rollout.vllm_async_server "max_concurrency=self.max_concurrency"
    # upstream: verl.workers.rollout.replica:RolloutReplica.max_concurrency(self)
    verls = RolloutReplica.max_concurrency.fget
    RolloutReplica.max_concurrency = property(lambda replica: max(verls(replica), slots))
