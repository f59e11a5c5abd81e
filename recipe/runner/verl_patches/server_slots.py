"""Slots of vLLM's servers for all requests that a run of an asynchronous mode sends at once.

A slot is one unfinished call to a vLLM server (a Ray actor). verl 0.9.1 gives a server ``max(1000,
max_num_seqs + 16)`` of them, for requests and for control (abort, sleep, new weights, go on). In the asynchronous modes
a request that comes while the weights change waits in its slot to be let on. Once such requests fill the slots, the
call that lets them on waits for them: the run stands still (verl issue 7990). In ``mode=sync`` no request is left then.
"""

from __future__ import annotations

from typing import Final

from verl.workers.rollout.replica import RolloutReplica

#: More than any run sends. One that is not used costs nothing: Ray counts those that are taken.
SLOTS: Final = 2**20


def give_servers_slots() -> None:
    """Let every server that this process starts take in so many calls at once.

    verl 0.9.1's number is a property of ``RolloutReplica`` with neither a setting nor a hook.
    """
    # upstream: verl.workers.rollout.replica "max(1000,"
    # upstream: verl.workers.rollout.vllm_rollout.vllm_async_server "max_concurrency=self.max_concurrency"
    # upstream: verl.workers.rollout.replica:RolloutReplica.max_concurrency(self)
    RolloutReplica.max_concurrency = SLOTS
