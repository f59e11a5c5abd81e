"""The last exception of verl's agent loop workers, which verl writes to a worker's log and to nobody else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Final

import ray
from verl.trainer.ppo.v1 import agent_loop_tq

from recipe.runner.launch.reward_function import describe

_ASK_S: Final = 10


class _Last(logging.Handler):
    """Keeps in ``text`` the last exception that is logged."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.text = describe(record.exc_info[1])


def _keep(worker: Any) -> None:
    """In a worker: keep the last exception of its agent loops; each such call forgets the one before."""
    worker.last_failure = _Last()
    agent_loop_tq.logger.addHandler(worker.last_failure)


def _kept(worker: Any) -> str:
    return worker.last_failure.text if hasattr(worker, "last_failure") else ""


def keep_failures(workers: Sequence[Any]) -> None:
    """Let each worker (a handle of a Ray actor) keep the last exception of its agent loops from now on."""
    for worker in workers:
        worker.__ray_call__.remote(_keep)


def last_failure(workers: Sequence[Any]) -> str:
    """The last exception that one of the workers has kept, with its traceback; empty if none has."""
    if not workers:  # of an agent loop manager of the user's
        return ""
    with contextlib.suppress(ray.exceptions.RayError):  # a worker that has died has another reporter
        return next(
            filter(None, ray.get([worker.__ray_call__.remote(_kept) for worker in workers], timeout=_ASK_S)), ""
        )
    return ""
