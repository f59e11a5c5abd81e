"""Responses without a gradient: all responses to their prompt earn the same reward. Defined here.

Their advantage A = r - mean(r) is 0, whatever it is divided by. verl 0.9.1's is not: the mean of equal float32 numbers
rounds, and GRPO divides by a standard deviation of 0 + 1e-6. Here A is set to 0.

With ``fspo.skip_zero_advantage`` their tokens go through neither pi_old's pass nor the updates. A padding row takes the
place of each response, so that every mini-batch keeps its number of rows. The loss is divided by the tokens and
responses of the whole mini-batch. So the gradient of a mini-batch is the same, and so is the optimizer's step, which is
also taken if nothing is left.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch
import transfer_queue as tq
from recipe.fspo.rollout_batch import Outcomes, prompt_of, response_of
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

#: Columns of a padding row and their tokens: one of a prompt, then one of a response. verl's own rows have 128.
_TOKENS: Final = {"prompts": 1, "input_ids": 2, "attention_mask": 2, "position_ids": 2}


def equal_rewards(outcomes: Outcomes) -> dict[str, float]:
    """Reward of each response without a gradient, by its key: all responses to its prompt, at least two, earn it.

    NaN equals no reward, not even another NaN.
    """
    rewards: dict[str, set[float]] = defaultdict(set)
    responses: dict[str, set[str]] = defaultdict(set)
    for key, reward in zip(outcomes.keys, outcomes.reward_B.tolist(), strict=True):
        rewards[prompt_of(key)].add(reward)  # of a response in several rows GRPO compares the last ones
        responses[prompt_of(key)].add(response_of(key))
    equal = {prompt for prompt, of_prompt in rewards.items() if len(of_prompt) == 1 and len(responses[prompt]) > 1}
    return {key: min(rewards[prompt_of(key)]) for key in outcomes.keys if prompt_of(key) in equal}


class Padding:
    """Padding rows that stand in for responses, from pi_old's pass to the update."""

    def __init__(self) -> None:
        self._tag: dict[str, Any] = {}
        self._whole: KVBatchMeta | None = None
        #: Key of the padding row by that of the response that it stands in for.
        self.stand_ins: dict[str, str] = {}

    def put(self, batch: KVBatchMeta, equal: Mapping[str, float], outcomes: Outcomes, eos_token_id: int) -> None:
        """Write a row of verl's padding into TransferQueue for each response to be left out, before verl balances.

        Those are the responses with equal rewards; if no response of the batch has a gradient, those of one prompt
        stay, because verl's metrics divide by their tokens. The tags of ``batch`` get the lengths that remain, by which
        verl balances; in place.

        A row has the reward of its response, and the rows of one prompt share a group: an estimator may count rewards.
        Its response mask is 0, and its loss mask the number of the response's tokens, which verl sums over the
        mini-batch.
        """
        stays = prompt_of(batch.keys[0]) if len(equal) == len(batch) else None
        rewards = {key: reward for key, reward in equal.items() if prompt_of(key) != stays}
        if not rewards:
            return
        pairs = zip(batch.keys, batch.tags, strict=True)
        batch.tags = [tag | ({"seq_len": 2} if key in rewards else {}) for key, tag in pairs]
        partition, name = str(batch.partition_id), f"pad{uuid.uuid4().hex}"
        first = next(iter(rewards))
        source = tq.kv_batch_get(keys=[first], partition_id=partition)[0]
        template, tag = construct_minimal_padding_template(source, batch.tags[batch.keys.index(first)], eos_token_id)
        template = {key: template[key] for key in [*source.keys()] if key in template}
        template |= {key: template[key][..., :tokens] for key, tokens in _TOKENS.items() if key in template}
        if "routed_experts" in template:
            template["routed_experts"] = template["routed_experts"][:2]
        self._tag = tag | {"prompt_len": 1, "seq_len": 2}
        lengths, fields = dict(zip(outcomes.keys, outcomes.length_B.tolist(), strict=True)), []
        for number, (key, reward) in enumerate(rewards.items()):
            self.stand_ins[key] = f"{name}_{number}_0"
            own = {"uid": f"{name}-{prompt_of(key)}", "rm_scores": torch.tensor([reward])}
            fields.append(template | own | {"loss_mask": torch.tensor([lengths[key]])})
        rows, keys = list_of_dict_to_tensordict(fields), [*self.stand_ins.values()]
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=rows, tags=[self._tag] * len(keys))

    def in_place(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The batch with padding rows in place of the responses; the batch itself if there are no padding rows."""
        if not self.stand_ins:
            return batch
        self._whole = batch
        tags = [self._tag if key in self.stand_ins else tag for key, tag in zip(batch.keys, batch.tags, strict=True)]
        keys = [self.stand_ins.get(key, key) for key in batch.keys]
        return KVBatchMeta(keys, tags, batch.partition_id, batch.fields, batch.extra_info)

    def removed(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Undo :meth:`in_place`: the batch with its responses; the padding rows are removed from TransferQueue."""
        if not self.stand_ins:
            return batch
        tq.kv_clear(keys=[*self.stand_ins.values()], partition_id=str(batch.partition_id))
        self.stand_ins = {}
        return self._whole
