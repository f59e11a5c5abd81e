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


def grad_norm_metrics(norm_M: list[float], clip: float) -> dict[str, float]:
    """Over the mini-batches of a step: the largest gradient norm, and the share in which the norm clip binds."""
    if not norm_M:
        return {}
    return {
        "fspo/grad_norm/max": max(norm_M),
        "fspo/grad_norm/clipped_share": sum(not norm <= clip for norm in norm_M) / len(norm_M),
    }


def _distinct_share(keys: list[str], responses: Any, correct_B: torch.Tensor | None) -> dict[str, float]:
    """Distinct responses over responses, and the same among the right ones, counted within each prompt's group."""
    seen: set[tuple[str, bytes]] = set()
    right: set[tuple[str, bytes]] = set()
    for row, (key, tokens) in enumerate(zip(keys, responses.unbind(), strict=True)):
        response = (key.split("_")[0], tokens.numpy().tobytes())
        seen.add(response)
        if correct_B is not None and correct_B[row] > 0:
            right.add(response)
    shares = {"fspo/outcome/distinct": len(seen) / len(keys)}
    if correct_B is not None and (n_correct := int((correct_B > 0).sum())):
        shares["fspo/outcome/distinct_correct"] = len(right) / n_correct
    return shares


def outcome_metrics(batch: KVBatchMeta, diagnostics: LengthDiagnostics) -> dict[str, float]:
    """Metrics of one training batch; padding rows are left out.

    Returns:
        ``reward/status/*`` (shares of the responses whose reward reports a status), ``fspo/outcome/{reward,acc}/*``
        (means by the length bins of the current window) and ``fspo/outcome/distinct*`` (diversity within a group).
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    fields = ["rm_scores", "responses", "extra_fields"]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
    length_B = data["responses"].offsets().diff()
    reward_B = torch.tensor([float(scores.sum()) for scores in data["rm_scores"].unbind()])
    metrics = diagnostics.outcome_metrics("reward", reward_B, length_B)
    info = [_reward_info(value) for value in list(data["extra_fields"])]
    acc_B = None
    if all("acc" in each for each in info):
        acc_B = torch.tensor([float(each["acc"]) for each in info])
        metrics |= diagnostics.outcome_metrics("acc", acc_B, length_B)
    if any("status" in each for each in info):
        metrics |= status_rates(each.get("status") for each in info)
    return metrics | _distinct_share(keys, data["responses"], acc_B)
