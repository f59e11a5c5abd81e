"""The sockets through which a node's weights go to vLLM: where no other user can make one of that name."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from recipe.runner.faults.node import PRIVATE_VARIABLE
from recipe.runner.faults.processes import RUN_ID_VARIABLE


def move_weights_to_the_private_folder(transfer: Any) -> None:
    """Have both ends of a transfer use the user's private folder in place of /tmp, and the run's id in the name.

    verl 0.9.1 names the socket by the number of Ray's job, which counts from 1 in every Ray: of two runs on one machine
    one receives the other's weights, or both wait for ever (seen). In /tmp another user can make a socket of that name
    first, and vLLM's workers unpickle what comes from it. There is neither a setting nor a hook.
    """

    # upstream: verl.workers.rollout.vllm_rollout.vllm_rollout "ipc:///tmp/rl-colocate-zmq-{job_id}-replica-"
    # upstream: verl.workers.rollout.vllm_rollout.utils "ipc:///tmp/rl-colocate-zmq-{job_id}-replica-"
    # upstream: verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender.__init__(zmq_handle)
    # upstream: verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver.__init__(zmq_handle)
    def moved(original: Any) -> Any:
        @wraps(original)
        def init(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
            original(self, private_handle(zmq_handle), *args, **kwargs)

        return init

    for end in (transfer.BucketedWeightSender, transfer.BucketedWeightReceiver):
        end.__init__ = moved(end.__init__)


def private_handle(handle: str) -> str:
    """verl's address ``ipc:///tmp/NAME`` in the private folder, which a run's workers know, with the run's id."""
    private, run = os.environ[PRIVATE_VARIABLE], os.environ[RUN_ID_VARIABLE]
    return f"ipc://{private}/{run[:16]}-{handle.rpartition('-zmq-')[2]}"
