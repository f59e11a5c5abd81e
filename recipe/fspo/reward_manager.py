"""verl's plain reward manager, plus the one number it keeps to itself: the length of the response in tokens."""

from __future__ import annotations

from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager


class TokenLengthRewardManager(NaiveRewardManager):
    """Puts `response_length` (tokens) into `extra_info` before the reward function runs.

    Configure it with `reward.reward_manager.source=importlib`, `reward.reward_manager.name=TokenLengthRewardManager`
    and `reward.reward_manager.module.path=pkg://recipe.fspo.reward_manager`.
    """

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        item = data[-1:][0]
        mask = item.batch["attention_mask"][-item.batch["responses"].shape[-1] :]
        # The object is shared with `data`; data sets without extra_info get an empty one from verl's RLHFDataset.
        item.non_tensor_batch["extra_info"]["response_length"] = int(mask.sum())
        return await super().run_single(data)
