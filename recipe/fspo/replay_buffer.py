"""verl's replay buffer in the data loader's order, with a line in ``ends.jsonl`` for what it evicts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

import transfer_queue as tq
from recipe.fspo.rollout_batch import lengths_and_ends, prompt_of, response_of
from recipe.runner.progress import append_records, writing
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

ENDS_FILE: Final = "ends.jsonl"
#: verl's reasons to evict a group (stale, filtered, failed), in the order in which one is named for a group of several.
_REASONS: Final = ((2, "failed"), (0, "stale"), (1, "filtered"))


class OrderedBuffer(ReplayBuffer):  # type: ignore[misc]
    """Hands out prompts in the order of their names, the data loader's, and writes into ``ends`` what it evicts.

    ``n`` is the number of responses per prompt; ``settings`` are verl's arguments.
    """

    def __init__(self, ends: Path, n: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._ends, self._n, self._step = ends, n, 0
        self._evicting: set[str] = set()

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
        # verl takes the oldest first, and among those of one step, a set, any.
        return super()._select_prompt_uids(partition_id, dict.fromkeys(sorted(sampleable_keys)).keys(), batch_size)

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: tuple[Any, ...]) -> Any:
        self._step, counted = global_steps, set[str]()
        for index, reason in _REASONS:
            self._write(reason, partition_id, eviction_reasons[index] - counted)
            counted |= eviction_reasons[index]
        self._evicting = counted
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        # Groups that are cleared, but not evicted for a reason, were more than the batch needed.
        self._write("surplus", partition_id, uids - self._evicting)
        self._evicting = set()
        super()._clear_groups(partition_id, uids)

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict[str, Any]]
    ) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        if partition_id == "train":
            # So runs with one seed form their mini-batches from the same prompts.
            batch.reorder(sorted(range(len(batch)), key=lambda row: prompt_of(batch.keys[row])))
            # A group of which some responses failed is trained on as far as it goes.
            missing = len(selected_prompt_uids) * self._n - len({response_of(key) for key in batch.keys})
            self._append("failed", [None] * missing)
        return batch

    def _write(self, reason: str, partition_id: str, uids: set[str]) -> None:
        """Write down the responses to these prompts; of those that are not in TransferQueue nobody knows the length."""
        if partition_id == "train" and uids:
            lengths = _lengths([key for key in self.partitions["train"] if prompt_of(key) in uids])
            self._append(reason, [*lengths, *[None] * (len(uids) * self._n - len(lengths))])

    def _append(self, reason: str, lengths: list[int | None]) -> None:
        if lengths:
            with writing(self._ends) as path:
                append_records(path, [{"step": self._step, "reason": reason, "lengths": lengths}])


class OrderedBufferAsync(OrderedBuffer, ReplayBufferAsync):  # type: ignore[misc]
    """The same for the asynchronous modes."""


def ordered(buffer: ReplayBuffer, ends: Path, n: int) -> ReplayBuffer:
    """The buffer to use in place of one that verl has just built, with the same settings.

    A buffer of a user's own class (``trainer.v1.sampler.custom_sampler``) is returned as it is.
    """
    ours = {ReplayBuffer: OrderedBuffer, ReplayBufferAsync: OrderedBufferAsync}.get(type(buffer))
    if ours is None:
        return buffer
    settings = {name: getattr(buffer, name) for name in inspect.signature(ReplayBuffer).parameters}
    return ours(ends, n, **settings)


def _lengths(keys: list[str]) -> list[int]:
    """L of each of these responses, of which an agent may have written one in several rows."""
    if not keys:
        return []
    masks = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["response_mask"])["response_mask"]
    lengths: dict[str, int] = {}
    for key, length in zip(keys, lengths_and_ends(masks)[0].tolist(), strict=True):
        lengths[response_of(key)] = lengths.get(response_of(key), 0) + length
    return [*lengths.values()]


def clear_trained() -> None:
    """After a resume: remove the responses whose prompt is not under way any more.

    verl saves the queue before it deletes the step's responses, and a resumed run never deletes them. Without this,
    each resume leaves one batch in the queue.
    """
    tags = (tq.kv_list("train") or {}).get("train", {})
    under_way = {key for key, tag in tags.items() if tag.get("is_prompt", False)}
    if done := [key for key in tags if prompt_of(key) not in under_way]:
        tq.kv_clear(partition_id="train", keys=done)
