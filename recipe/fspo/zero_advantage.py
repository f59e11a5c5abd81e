"""Responses without a gradient: all responses to their prompt earn the same reward. Defined here.

Their advantage A = r - mean(r) is 0, whatever it is divided by. verl 0.9.1's is not: the mean of equal float32 numbers
rounds, and GRPO divides by a standard deviation of 0 + 1e-6. So |A| is 0.0074 for eight rewards of 0.1, and 0.056 for
eight of 0.7. Here A is set to 0.

With ``fspo.skip_zero_advantage`` their tokens go through neither pi_old's pass nor the updates. A padding row takes the
place of each response, so that every mini-batch keeps its number of rows. The loss is divided by the tokens and
responses of the whole mini-batch. So the gradient of a mini-batch is the same, and so is the optimizer's step, which is
also taken if nothing is left. One thing can change: where verl balances a whole rollout batch over several ranks, the
shorter rows may be put into other mini-batches.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import transfer_queue as tq
from recipe.fspo.accounting.outcomes import Outcomes, prompt_of, response_of, rows_of
from recipe.fspo.recorder import MiniBatch, join_ranks
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

#: Tokens of a padding row: one of a prompt, then one of a response. verl's own rows have 128.
_TOKENS: Final = 2


def equal_rewards(batch: KVBatchMeta) -> dict[str, float]:
    """Reward of each response without a gradient, by its key: all responses to its prompt, at least two, earn it.

    Padding rows do not count. A reward is the sum of a row of ``rm_scores`` in float32, as verl's estimators compute
    it. NaN equals no reward, not even another NaN.
    """
    keys = rows_of(batch)
    scores = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"])["rm_scores"]
    rewards: dict[str, set[float]] = defaultdict(set)
    responses: dict[str, set[str]] = defaultdict(set)
    for key, reward in zip(keys, scores.to_padded_tensor(0.0).sum(dim=-1).tolist(), strict=True):
        rewards[prompt_of(key)].add(reward)  # of a response in several rows GRPO compares the last ones
        responses[prompt_of(key)].add(response_of(key))
    equal = {prompt for prompt, of_prompt in rewards.items() if len(of_prompt) == 1 and len(responses[prompt]) > 1}
    return {key: min(rewards[prompt_of(key)]) for key in keys if prompt_of(key) in equal}


def write_zeros(partition_id: str, lengths: Mapping[str, int]) -> None:
    """Set A and the returns to exactly 0 in TransferQueue, for rows with these keys and numbers of tokens."""
    zeros = torch.nested.as_nested_tensor([torch.zeros(length) for length in lengths.values()], layout=torch.jagged)
    fields = TensorDict({"advantages": zeros, "returns": zeros}, [len(lengths)])
    tq.kv_batch_put(keys=[*lengths], partition_id=partition_id, fields=fields)


def to_be_left_out(batch: KVBatchMeta, equal: Mapping[str, float]) -> list[str]:
    """Keys of the rows whose tokens can be left out.

    If no response of the batch has a gradient, those of one prompt stay, because verl's metrics divide by their tokens.
    The tags of ``batch`` get the lengths that remain, by which verl balances the ranks; in place.
    """
    kept = prompt_of(batch.keys[0]) if len(equal) == len(batch) else None
    keys = [key for key in batch.keys if key in equal and prompt_of(key) != kept]
    left_out = {*keys}
    batch.tags = [
        {**tag, "seq_len": _TOKENS} if key in left_out else tag for key, tag in zip(batch.keys, batch.tags, strict=True)
    ]
    return keys


class Padding:
    """Padding rows that stand in for responses, from pi_old's pass to the update."""

    def __init__(self) -> None:
        self._partition = ""
        #: By the key of a response: key and tag of the padding row that stands in for it.
        self._rows: dict[str, tuple[str, dict[str, Any]]] = {}

    @property
    def keys(self) -> list[str]:
        """Keys of the padding rows."""
        return [key for key, _ in self._rows.values()]

    def put(
        self, batch: KVBatchMeta, rewards: Mapping[str, float], lengths: Mapping[str, int], eos_token_id: int
    ) -> None:
        """Write a row of verl's padding into TransferQueue for each response of ``rewards``.

        It has the reward of its response, and the rows of one prompt share a group, because an estimator may count
        rewards. Its response mask is 0. Its loss mask is the number of the response's tokens: verl only sums it over
        the mini-batch, for ``batch_num_tokens``.

        Args:
            batch: The batch with the responses.
            rewards: Reward of each response to be replaced, by its key.
            lengths: L of each of these responses in tokens, by its key.
            eos_token_id: The token that the rows consist of.
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
            own = {"uid": f"{name}-{prompt_of(key)}", "rm_scores": torch.tensor([reward])}
            fields.append(template | own | {"loss_mask": torch.tensor([lengths[key]])})
        tags = [tag] * len(fields)
        tq.kv_batch_put(
            keys=self.keys, partition_id=self._partition, fields=list_of_dict_to_tensordict(fields), tags=tags
        )

    def in_place(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The batch with padding rows in place of the responses; the batch itself if there are no padding rows."""
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
    """A field of verl's padding row, cut to the tokens of ours."""
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
    """The mini-batches of an update, with a row for each response that was left out: A is 0, and S is not known.

    Args:
        mini_batches: The mini-batches, joined over the ranks.
        batch: The batch, in the order in which the ranks cut it into mini-batches. With ``actor.shuffle`` they draw
            others.
        left_out: Keys of the responses that were left out.
        outcomes: Outcomes of the batch.
        first_row: Row number of its first response.
        step: Number of the step.
        ranks: Number of ranks that have rows of their own.
        epochs: Number of mini-batches that each response is in.
        longest: Responses that end here or later count as truncated, as in the recorder.
    """
    if not left_out:
        return list(mini_batches)
    of_rank, updates = len(batch) // ranks, len(mini_batches) // epochs
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
            "truncated": (outcomes.end_B[index] >= longest).float().numpy(),
        }
        joined += join_ranks([[mini_batch], [MiniBatch(mini_batch.number, rows)]])
    return joined
