"""What a run says of its responses: how far a generation is, how many are missing or cut, why agent loops fail."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from recipe.runner.launch.end_of_turn import remedy
from recipe.runner.launch.reward_function import describe
from recipe.runner.progress import PROGRESS

#: Share of responses cut at the maximum length above which it is said.
_MANY_CUT: Final = 0.5
_ASK_S: Final = 10


def tell_polls(buffer: ReplayBuffer, at_poll: Callable[[str], None]) -> None:
    """Call ``at_poll`` at every poll of a buffer with how far the generation is, so that a long one is no hang."""
    # upstream: verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll(partition_id, last_debug_time)
    wait, names = buffer._wait_for_next_poll, ("pending_keys", "running_keys", "finished_keys", "failure_keys")

    def note_and_wait(partition_id: str, last_debug_time: float) -> float:
        words = "{} responses finished; prompts: {} pending, {} running, {} finished, {} failed"
        at_poll(words.format(*(len(getattr(buffer, name)[partition_id]) for name in ("partitions", *names))))
        return float(wait(partition_id, last_debug_time))

    buffer._wait_for_next_poll = note_and_wait


def warn_of_cut(lengths: Sequence[int], limit: int, step: int) -> bool:
    """Say that most responses of a step ended at ``data.max_response_length``, if they did; whether it was said."""
    share = sum(length >= limit for length in lengths) / max(1, len(lengths))
    if share > _MANY_CUT:
        PROGRESS.say(
            f"warning: {share:.0%} of the responses of the rollout batch of step {step} were cut at "
            f"data.max_response_length={limit}: rewards and lengths are those of the limit. Raise it; or, if the "
            f"responses go on after their answer (trainer.rollout_data_dir dumps them), {remedy()}"
        )
    return share > _MANY_CUT


def warn_of_missing(missing: int, expected: int, where: str, verl: str) -> None:
    """Say how many responses ``where`` lacks, and what verl does about it."""
    if missing > 0:
        PROGRESS.say(
            f"warning: {where} has {expected - missing} of {expected} responses; generation or reward of {missing} "
            f"failed. verl {verl}. Reason: Ray's logs of AgentLoopWorker"
        )


class _Last(logging.Handler):
    """Keeps in ``text`` the last exception that is logged."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.text = describe(record.exc_info[1])


def _keep(worker: Any) -> None:
    """In a worker: keep the last exception of its agent loops; each such call forgets the one before."""
    worker.last_failure = _Last()
    # upstream: verl.trainer.ppo.v1.agent_loop_tq "exc_info=(type(error), error, error.__traceback__)"
    agent_loop_tq.logger.addHandler(worker.last_failure)


def _kept(worker: Any) -> str:
    return worker.last_failure.text if hasattr(worker, "last_failure") else ""


def keep_failures(workers: Sequence[Any]) -> None:
    """Let each worker (a handle of a Ray actor) keep the last exception of its agent loops from now on.

    verl writes it to the worker's log and to nobody else.
    """
    for worker in workers:
        worker.__ray_call__.remote(_keep)


def last_failure(workers: Sequence[Any]) -> str:
    """The last exception that one of the workers has kept, with its traceback; empty if none has."""
    asked = [worker.__ray_call__.remote(_kept) for worker in workers]
    with contextlib.suppress(ray.exceptions.RayError):  # a worker that has died has another reporter
        return next(filter(None, ray.get(asked, timeout=_ASK_S)), "")
    return ""
