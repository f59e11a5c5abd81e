"""Responses without a gradient: those to a prompt all of whose responses earn the same reward. Defined here.

Their advantage is A = r - mean(r) = 0, over whatever spread. verl 0.9.1's is not: the mean of equal float32 numbers
rounds, and GRPO divides by a spread of 0 + 1e-6: |A| is 0.0074 for eight rewards of 0.1, and 0.056 for 0.7
(docs/upstream/equal-rewards.patch).

With ``fspo.skip_zero_advantage`` their tokens are left out of pi_old's pass and of the updates: a padding row stands in
the place of each, so that mini-batches keep their number of rows, and what a loss divides by is that of the whole
mini-batch. The gradient of a mini-batch is the same, and so is the optimizer's step, of one with nothing left, too.
Where verl balances a whole rollout batch over several ranks, other lengths make other mini-batches.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import transfer_queue as tq
from recipe.fspo.accounting.outcomes import Outcomes
from recipe.fspo.recorder import MiniBatch, join_ranks
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

#: Tokens of a padding row: one of a response, and before it one of a prompt. verl's own have 128.
_TOKENS: Final = 2


def equal_rewards(batch: KVBatchMeta) -> dict[str, float]:
    """Keys of the responses to prompts whose responses, at least two, earn the same reward, which is the value.

    Padding is none of them.

    A reward is what verl's estimators take it to be: the sum of a row of ``rm_scores``, in float32. One that is NaN
    equals none.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    scores = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"])["rm_scores"]
    rewards: dict[str, set[float]] = defaultdict(set)
    responses: dict[str, set[str]] = defaultdict(set)
    for key, reward in zip(keys, scores.to_padded_tensor(0.0).sum(dim=-1).tolist(), strict=True):
        # An agent may write one response in several rows, {prompt}_{response}_{row}; GRPO compares the last ones.
        prompt, response, _ = key.rsplit("_", 2)
        rewards[prompt].add(reward)
        responses[prompt].add(response)
    equal = {prompt for prompt, of_prompt in rewards.items() if len(of_prompt) == 1 and len(responses[prompt]) > 1}
    prompts = {key: key.rsplit("_", 2)[0] for key in keys}
    return {key: min(rewards[prompt]) for key, prompt in prompts.items() if prompt in equal}


def write_zeros(partition_id: str, lengths: Mapping[str, int]) -> None:
    """Make A exactly 0 in TransferQueue, and so the returns, of the rows with these keys, each of so many tokens."""
    zeros = torch.nested.as_nested_tensor([torch.zeros(length) for length in lengths.values()], layout=torch.jagged)
    fields = TensorDict({"advantages": zeros, "returns": zeros}, [len(lengths)])
    tq.kv_batch_put(keys=[*lengths], partition_id=partition_id, fields=fields)


def to_be_left_out(batch: KVBatchMeta, equal: Mapping[str, float]) -> list[str]:
    """Keys of the rows whose tokens can go. Of a batch without any gradient a group stays: verl's metrics divide by its
    tokens. The tags of ``batch`` get the lengths that are left, by which the ranks are balanced; in place.
    """
    kept = batch.keys[0].rsplit("_", 2)[0] if len(equal) == len(batch) else None
    keys = [key for key in batch.keys if key in equal and key.rsplit("_", 2)[0] != kept]
    left_out = {*keys}
    batch.tags = [
        {**tag, "seq_len": _TOKENS} if key in left_out else tag for key, tag in zip(batch.keys, batch.tags, strict=True)
    ]
    return keys


class Padding:
    """Padding rows in the places of responses, from pi_old's pass to the update."""

    def __init__(self) -> None:
        self._partition = ""
        #: Key of the padding row in the place of each response, and its tag.
        self._rows: dict[str, tuple[str, dict[str, Any]]] = {}

    @property
    def keys(self) -> list[str]:
        """Of the padding rows."""
        return [key for key, _ in self._rows.values()]

    def put(
        self, batch: KVBatchMeta, rewards: Mapping[str, float], lengths: Mapping[str, int], eos_token_id: int
    ) -> None:
        """Write a row of verl's padding for each response of ``rewards`` into TransferQueue.

        It has the reward and the group of its response, because an estimator may count rewards. Its response mask is 0.
        Its loss mask, of which verl computes nothing but the sum over the mini-batch for ``batch_num_tokens``, is the
        number of the response's tokens.

        Args:
            batch: Holds the responses.
            rewards: By the keys of the responses whose places the rows take.
            lengths: L of each, tokens.
            eos_token_id: What the rows consist of.
        """
        self._partition, name = str(batch.partition_id), f"pad{uuid.uuid4().hex}"
        first = next(iter(rewards))
        source = tq.kv_batch_get(keys=[first], partition_id=self._partition)[0]
        tag = dict(zip(batch.keys, batch.tags, strict=True))[first]
        template, tag = construct_minimal_padding_template(source, tag, eos_token_id)
        template = {key: _shortened(key, value) for key, value in template.items() if key in source.keys()}  # noqa: SIM118
        tag |= {"prompt_len": _TOKENS - 1, "seq_len": _TOKENS}
        fields = []
        for number, (key, reward) in enumerate(rewards.items()):
            self._rows[key] = f"{name}_{number}_0", tag
            own = {"uid": f"{name}-{key.rsplit('_', 2)[0]}", "rm_scores": torch.tensor([reward])}
            fields.append(template | own | {"loss_mask": torch.tensor([lengths[key]])})
        tags = [tag] * len(fields)
        tq.kv_batch_put(
            keys=self.keys, partition_id=self._partition, fields=list_of_dict_to_tensordict(fields), tags=tags
        )

    def in_place(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The batch with the padding rows in the places of the responses; itself where there are none."""
        if not self._rows:
            return batch
        rows = [self._rows.get(key, (key, tag)) for key, tag in zip(batch.keys, batch.tags, strict=True)]
        keys, tags = ([row[part] for row in rows] for part in (0, 1))
        return KVBatchMeta(keys, tags, batch.partition_id, batch.fields, batch.extra_info)

    def clear(self) -> None:
        """Remove the rows from TransferQueue."""
        if self._rows:
            tq.kv_clear(keys=self.keys, partition_id=self._partition)
        self._rows = {}


def _shortened(name: str, value: Any) -> Any:
    """A field of verl's padding row with the tokens of ours."""
    if not torch.is_tensor(value):
        return value
    if name == "prompts":
        return value[: _TOKENS - 1]
    if name in ("input_ids", "attention_mask", "routed_experts"):
        return value[:_TOKENS]
    return value[..., :_TOKENS] if name == "position_ids" else value


def with_rows_left_out(
    mini_batches: Sequence[MiniBatch],
    batch: KVBatchMeta,
    left_out: Collection[str],
    outcomes: Outcomes,
    first_row: int,
    step: int,
    ranks: int,
    epochs: int,
    longest: int,
) -> list[MiniBatch]:
    """The mini-batches of an update with a row for each response that was left out: A = 0, without S.

    Args:
        mini_batches: Of the update, joined over the ranks.
        batch: In the order in which the ranks cut it into mini-batches (with ``actor.shuffle`` they draw others).
        left_out: Keys of the responses.
        outcomes: Of the batch.
        first_row: Number of its first response.
        step: Of the update.
        ranks: That have rows of their own.
        epochs: How often each response is in a mini-batch.
        longest: Responses of so many tokens count as truncated.
    """
    if not left_out:
        return list(mini_batches)
    of_rank, updates = len(batch) // ranks, len(mini_batches) // epochs
    end = {key: tag["response_len"] for key, tag in zip(batch.keys, batch.tags, strict=True)}
    update_of = {key: place % of_rank * updates // of_rank for place, key in enumerate(batch.keys) if key in left_out}
    joined = []
    for update, mini_batch in enumerate(mini_batches):
        index = [row for row, key in enumerate(outcomes.keys) if update_of.get(key) == update % updates]
        index = [row for row in index if outcomes.length_B[row] > 0]
        place = {"step": step, "update": update, "minibatch": mini_batch.number}
        rows = {
            **{name: np.full(len(index), value, np.int64) for name, value in place.items()},
            "S": np.full(len(index), np.nan, np.float32),
            "A": np.zeros(len(index), np.float32),
            "L": outcomes.length_B[index].numpy(),
            "row": np.array(index, np.int64) + first_row,
            "truncated": np.array([end[outcomes.keys[row]] >= longest for row in index], np.float32),
        }
        joined += join_ranks([[mini_batch], [MiniBatch(mini_batch.number, rows)]])
    return joined
