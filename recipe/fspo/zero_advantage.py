"""Responses without a gradient: those to a prompt all of whose responses earn the same reward. Defined here.

Their advantage is A = r - mean(r) = 0, over whatever spread. verl 0.9.1's is not: the mean of equal float32 numbers
rounds, and GRPO divides by a spread of 0 + 1e-6: |A| is 0.0074 for eight rewards of 0.1, and 0.056 for 0.7
(docs/upstream/equal-rewards.patch).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta


def equal_rewards(batch: KVBatchMeta) -> list[str]:
    """Keys of the responses to prompts whose responses, at least two, earn the same reward; padding is none of them.

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
    return [key for key in keys if key.rsplit("_", 2)[0] in equal]


def write_zeros(partition_id: str, keys: Sequence[str], lengths: Sequence[int]) -> None:
    """Make A of these rows, with so many tokens each, exactly 0 in TransferQueue, and so their returns."""
    zeros = torch.nested.as_nested_tensor([torch.zeros(length) for length in lengths], layout=torch.jagged)
    fields = TensorDict({"advantages": zeros, "returns": zeros}, [len(keys)])
    tq.kv_batch_put(keys=list(keys), partition_id=partition_id, fields=fields)
