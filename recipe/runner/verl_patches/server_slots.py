"""How many requests a run sends to vLLM's servers at once, and the slots for them.

A slot is one unfinished call to a vLLM server (a Ray actor). verl 0.9.1 gives a server ``max(1000,
max_num_seqs + 16)`` of them, for requests and for control (abort, sleep, new weights, go on). In the asynchronous modes
a request that comes while the weights change waits in its slot to be let on. Once such requests fill the slots, the
call that lets them on waits for them: the run stands still (verl issue 7990). In ``mode=sync`` no request is left then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from omegaconf import DictConfig

from recipe.runner import ranks
from recipe.runner.ranks import asynchronous_mode

#: For control calls; verl's trainers wait for each of theirs before they make the next.
CONTROL_SLOTS: Final = 64
#: Ray reserves a stack of 256 KiB for each call in progress: 16 GiB of addresses for these. More has not been tried.
MOST_SLOTS: Final = 65_536


def servers(config: DictConfig) -> int:
    """vLLM's replicas that answer the prompts of the training."""
    separate = asynchronous_mode(config) == "separate_async"
    devices = ranks.only_generating(config) if separate else ranks.training(config)
    return max(1, devices // ranks.of_replica(config))


def requests_at_once(config: DictConfig) -> int:
    """Responses to the step's prompts and to those in advance, over all servers."""
    mode = asynchronous_mode(config)
    advance = config.trainer.v1[mode].num_warmup_batches if mode else 0
    return math.ceil(config.data.train_batch_size * (1 + advance)) * int(config.actor_rollout_ref.rollout.n)


def requests_per_server(config: DictConfig) -> int:
    """A server's part of them, where verl's load balancer keeps the parts equal."""
    return -(-requests_at_once(config) // servers(config))


def slots(config: DictConfig) -> int | None:
    """Slots that each server needs; None: verl's number will do.

    They are enough for the requests of all servers. An aborted request returns to the server that it came from, so the
    parts do not stay equal, and a slot that nobody uses costs nothing.
    """
    return requests_at_once(config) + CONTROL_SLOTS if asynchronous_mode(config) else None


def problems(config: DictConfig) -> Iterator[str]:
    """More slots than a server may have."""
    if (needed := slots(config) or 0) > MOST_SLOTS:
        prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
        yield (
            f"data.train_batch_size={prompts} x rollout.n={n} and the batches in advance need {needed} slots in a vLLM "
            f"server, and {MOST_SLOTS} are the most: lower one of them, or set mode=sync"
        )


def give_servers_slots(slots: int) -> None:
    """Let every server that this process starts take in ``slots`` calls at once, or verl's number if that is larger.

    verl 0.9.1's number is a property of ``RolloutReplica`` with neither a setting nor a hook.
    """
    from verl.workers.rollout.replica import RolloutReplica

    verls = RolloutReplica.max_concurrency.fget
    RolloutReplica.max_concurrency = property(lambda replica: max(verls(replica), slots))
