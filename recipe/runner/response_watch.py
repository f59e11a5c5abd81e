"""Looks at the responses of rollout batches and validations: are some missing, were most of them cut at the limit?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from recipe.runner.launch.end_of_turn import remedy
from recipe.runner.progress import PROGRESS

#: Share of responses cut at the maximum length above which it is said.
_MANY_CUT: Final = 0.5


class ResponseWatch:
    """Says what is wrong with the responses that a replay buffer hands out.

    Args:
        limit: ``data.max_response_length``.
        at_poll: Called at every poll of a buffer with how far the generation is, so that a long one is no hang.
    """

    def __init__(self, limit: int, at_poll: Callable[[str], None]) -> None:
        self._limit, self._at_poll = limit, at_poll
        self._lengths: dict[str, list[int]] = {}  # of the responses of a step and of a validation, by partition
        self._warned: set[str] = set()

    def watch(self, buffer: ReplayBuffer) -> None:
        """Follow a buffer's polls and batches from now on."""
        wait, sample = buffer._wait_for_next_poll, buffer.sample

        def note_and_wait(partition_id: str, last_debug_time: float) -> float:
            names = ("partitions", "pending_keys", "running_keys", "finished_keys", "failure_keys")
            words = "{} responses finished; prompts: {} pending, {} running, {} finished, {} failed"
            self._at_poll(words.format(*(len(getattr(buffer, name)[partition_id]) for name in names)))
            return float(wait(partition_id, last_debug_time))

        def sample_and_look(*arguments: Any, **more: Any) -> Any:
            batch, metrics = sample(*arguments, **more)
            # One of several of a validation, and of a step in separate_async, whose first has the shortest responses.
            self._lengths.setdefault(batch.partition_id, []).extend(int(tag["response_len"]) for tag in batch.tags)
            return batch, metrics

        buffer._wait_for_next_poll, buffer.sample = note_and_wait, sample_and_look

    def end(self, partition: str, step: int) -> None:
        """Look at the responses of a step (``train``) or a validation (``val``) as a whole, and forget them."""
        what = "the rollout batch of step" if partition == "train" else "the validation after step"
        self._warn_of_cut(what, step, self._lengths.pop(partition, []))

    def _warn_of_cut(self, what: str, step: int, lengths: Sequence[int]) -> None:
        """Say once of rollout batches, and once of validations, that most responses ended at the limit."""
        share = sum(length >= self._limit for length in lengths) / max(1, len(lengths))
        if share > _MANY_CUT and what not in self._warned:
            self._warned.add(what)
            PROGRESS.say(
                f"warning: {share:.0%} of the responses of {what} {step} were cut at "
                f"data.max_response_length={self._limit}: rewards and lengths are those of the limit. Raise it; or, if "
                "the responses go on after their answer (trainer.rollout_data_dir and trainer.validation_data_dir dump "
                f"them), {remedy()}"
            )


def warn_of_missing(missing: int, expected: int, where: str, verl: str) -> None:
    """Say how many responses ``where`` lacks, and what verl does about it."""
    if missing > 0:
        PROGRESS.say(
            f"warning: {where} has {expected - missing} of {expected} responses; generation or reward of {missing} "
            f"failed. verl {verl}. Reason: Ray's logs of AgentLoopWorker"
        )
