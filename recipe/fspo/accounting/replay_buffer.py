"""verl's replay buffer, which also counts by length what it removes."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import transfer_queue as tq
from recipe.fspo.accounting.funnel import LengthFunnel
from recipe.fspo.accounting.outcomes import Outcomes, lengths_and_ends, prompt_of, response_of
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

#: verl's reasons to evict a group (stale, filtered, failed), in the order in which one is named for a group of several.
_REASONS = ((2, "failed"), (0, "stale"), (1, "filtered"))

_Reasons = tuple[set[str], set[str], set[str], Counter[float]]


class CountingBuffer(ReplayBuffer):  # type: ignore[misc]
    """Counts in ``funnel`` what it removes, and hands out prompts in the data loader's order.

    Args:
        funnel: Counts responses.
        n: Responses per prompt.
        order: Position of each prompt in the data loader; unknown prompts come first.
        settings: verl's arguments.
    """

    def __init__(self, funnel: LengthFunnel, n: int, order: dict[str, int], **settings: Any) -> None:
        super().__init__(**settings)
        self.funnel, self.n, self.order = funnel, n, order

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
        # verl takes the oldest first, and among those of one step, a set, any. Here: in the data loader's order.
        in_order = dict.fromkeys(sorted(sampleable_keys, key=lambda uid: self.order.get(uid, -1)))
        return super()._select_prompt_uids(partition_id, in_order.keys(), batch_size)

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: _Reasons) -> Any:
        counted: set[str] = set()
        for index, stage in _REASONS:
            self._count(stage, partition_id, eviction_reasons[index] - counted)
            counted |= eviction_reasons[index]
        self._evicting = counted
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        # Groups that are cleared, but not evicted for a reason, were more than the batch needed.
        self._count("surplus", partition_id, uids - getattr(self, "_evicting", set()))
        self._evicting = set()
        super()._clear_groups(partition_id, uids)

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict[str, Any]]
    ) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        if partition_id == "train":
            # verl returns the groups of a rollout batch in the order of random identifiers. In the data loader's order,
            # runs with one seed form their mini-batches from the same prompts.
            position = [self.order.get(prompt_of(key), -1) for key in batch.keys]  # first: those before a resume
            batch.reorder(sorted(range(len(batch)), key=position.__getitem__))
            for prompt in selected_prompt_uids:
                self.order.pop(prompt, None)
            # A group of which some responses failed is trained on as far as it goes.
            there = len({response_of(key) for key in batch.keys})
            self.funnel.end("failed", [], unknown=len(selected_prompt_uids) * self.n - there)
        return batch

    def _count(self, stage: str, partition_id: str, uids: set[str]) -> None:
        if partition_id == "train" and uids:
            lengths = self._lengths(uids)
            self.funnel.end(stage, lengths, unknown=len(uids) * self.n - len(lengths))

    def _lengths(self, uids: set[str]) -> list[int]:
        """Lengths of the responses in TransferQueue to these training prompts."""
        if not (keys := [key for key in self.partitions["train"] if prompt_of(key) in uids]):
            return []
        masks = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["response_mask"])["response_mask"]
        lengths, _ = lengths_and_ends(masks)
        return [*_by_response(keys, dict(zip(keys, lengths.tolist(), strict=True))).values()]


class CountingBufferAsync(CountingBuffer, ReplayBufferAsync):  # type: ignore[misc]
    """The same for the asynchronous modes."""


def counting(buffer: ReplayBuffer, funnel: LengthFunnel, responses: int, position: dict[str, int]) -> ReplayBuffer:
    """The buffer to use in place of one that verl has just built: a counting one with the same settings.

    A buffer of a user's own class (``trainer.v1.sampler.custom_sampler``) is returned as it is.
    """
    ours = {ReplayBuffer: CountingBuffer, ReplayBufferAsync: CountingBufferAsync}.get(type(buffer))
    if ours is None:
        return buffer
    settings = {name: getattr(buffer, name) for name in inspect.signature(ReplayBuffer).parameters}
    return ours(funnel, responses, position, **settings)


def _by_response(keys: Iterable[str], row_lengths: Mapping[str, int]) -> dict[str, int]:
    """L of each response, from those of its rows."""
    lengths: dict[str, int] = {}
    for key in keys:
        lengths[response_of(key)] = lengths.get(response_of(key), 0) + row_lengths[key]
    return lengths


def training_prompts() -> dict[str, dict[str, Any]]:
    """verl's tags of the training's prompts in TransferQueue that are under way, by the prompt's identifier."""
    return {key: tag for key, tag in _training_tags().items() if tag.get("is_prompt", False)}


def clear_trained() -> None:
    """After a resume: remove the responses whose prompt is not under way any more.

    verl saves TransferQueue before it removes those of the step, and nobody would after a resume; every one would leave
    a batch behind, until the queue is full.
    """
    under_way = training_prompts()
    if done := [key for key in _training_tags() if prompt_of(key) not in under_way]:
        tq.kv_clear(partition_id="train", keys=done)


def _training_tags() -> dict[str, dict[str, Any]]:
    return (tq.kv_list("train") or {}).get("train", {})


def train_on(funnel: LengthFunnel, batch: KVBatchMeta, outcomes: Outcomes, step: int) -> None:
    """Count the responses of a training batch, without padding rows.

    Args:
        funnel: Counts responses.
        batch: With verl's tags.
        outcomes: Of the batch, with the lengths.
        step: Of the update.
    """
    lengths = _by_response(outcomes.keys, dict(zip(outcomes.keys, outcomes.length_B.tolist(), strict=True)))
    tag_of = {response_of(key): tag for key, tag in zip(batch.keys, batch.tags, strict=True)}
    tags = {response: tag_of[response] for response in lengths}
    versions = [(tag.get("min_global_steps"), tag.get("max_global_steps")) for tag in tags.values()]
    funnel.train(
        list(lengths.values()),
        [step - funnel.first_issue.get(prompt_of(key), tag["global_steps"]) for key, tag in tags.items()],
        [1 if None in (low, high) else high - low + 1 for low, high in versions],
    )
