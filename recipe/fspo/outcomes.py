"""What became of a step's responses: statuses of the reward, and reward and accuracy by response length.

verl's trainer keeps what a reward function returns besides the score (verl 0.9.1 logs it in validation only), so it is
read here from the batch in TransferQueue.
"""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from fspo.diagnostics import LengthDiagnostics
from fspo.rewards import status_rates


def _reward_info(extra_fields: Any) -> dict[str, Any]:
    fields = getattr(extra_fields, "data", extra_fields)
    return (fields.get("reward_extra_info") or {}) if isinstance(fields, dict) else {}


def outcome_metrics(batch: KVBatchMeta, diagnostics: LengthDiagnostics) -> dict[str, float]:
    """Metrics of one training batch; padding rows are left out.

    Returns:
        ``reward/status/*`` (shares of the responses whose reward reports a status) and ``fspo/outcome/{reward,acc}/*``
        (means by the length bins of the current window).
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    fields = ["rm_scores", "responses", "extra_fields"]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
    length_B = data["responses"].offsets().diff()
    reward_B = torch.tensor([float(scores.sum()) for scores in data["rm_scores"].unbind()])
    metrics = diagnostics.outcome_metrics("reward", reward_B, length_B)
    info = [_reward_info(value) for value in list(data["extra_fields"])]
    if all("acc" in each for each in info):
        acc_B = torch.tensor([float(each["acc"]) for each in info])
        metrics |= diagnostics.outcome_metrics("acc", acc_B, length_B)
    if any("status" in each for each in info):
        metrics |= status_rates(each.get("status") for each in info)
    return metrics
