"""What became of a step's responses: statuses of the reward, reward and accuracy by length, bins by other attributes.

verl's trainer keeps what a reward function returns besides the score (verl 0.9.1 logs it in validation only), so it is
read here from the batch in TransferQueue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from fspo.attributes import Attribute, bin_batch
from fspo.diagnostics import LengthDiagnostics
from fspo.rewards import status_rates
from recipe.fspo.recorder import ATTRIBUTE_BINS


def prompt_of(key: str) -> str:
    """The prompt's identifier in a response's key in TransferQueue: ``{prompt}_{session}_{index}``."""
    return key.split("_")[0]


def _reward_info(extra_fields: Any) -> dict[str, Any]:
    fields = getattr(extra_fields, "data", extra_fields)
    return (fields.get("reward_extra_info") or {}) if isinstance(fields, dict) else {}


def grad_norm_metrics(norms: Sequence[float | None], clip: float) -> dict[str, float]:
    """Over the mini-batches of a step: the largest gradient norm, and the share in which the norm clip binds."""
    known = [norm for norm in norms if norm is not None]
    if not known:
        return {}
    return {
        "fspo/grad_norm/max": max(known),
        "fspo/grad_norm/clipped_share": sum(not norm <= clip for norm in known) / len(known),
    }


def _distinct_share(keys: list[str], responses: Any, correct_B: torch.Tensor | None) -> dict[str, float]:
    """Distinct responses over responses, and the same among the right ones, counted within each prompt's group."""
    seen: set[tuple[str, bytes]] = set()
    right: set[tuple[str, bytes]] = set()
    for row, (key, tokens) in enumerate(zip(keys, responses.unbind(), strict=True)):
        response = (prompt_of(key), tokens.numpy().tobytes())
        seen.add(response)
        if correct_B is not None and correct_B[row] > 0:
            right.add(response)
    shares = {"fspo/outcome/distinct": len(seen) / len(keys)}
    if correct_B is not None and (n_correct := int((correct_B > 0).sum())):
        shares["fspo/outcome/distinct_correct"] = len(right) / n_correct
    return shares


@dataclass(frozen=True)
class Outcomes:
    """The responses of one training batch and what became of them, without padding rows."""

    keys: list[str]  # of TransferQueue: prompt's identifier, "_", number of the response
    responses: Any  # nested, [B, L]
    reward_B: torch.Tensor
    data_source_B: list[str]
    info_B: list[dict[str, Any]]  # what the reward function returned besides the score

    @property
    def length_B(self) -> torch.Tensor:
        """Response lengths in tokens."""
        lengths: torch.Tensor = self.responses.offsets().diff()
        return lengths

    @property
    def group_B(self) -> torch.Tensor:
        """Number of each response's prompt."""
        prompts = [prompt_of(key) for key in self.keys]
        number = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        return torch.tensor([number[prompt] for prompt in prompts])


def read_outcomes(batch: KVBatchMeta) -> Outcomes:
    """Read a training batch's responses and rewards from TransferQueue."""
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    fields = ["rm_scores", "responses", "extra_fields", "data_source"]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
    return Outcomes(
        keys=keys,
        responses=data["responses"],
        reward_B=torch.tensor([float(scores.sum()) for scores in data["rm_scores"].unbind()]),
        data_source_B=[str(source) for source in list(data["data_source"])],
        info_B=[_reward_info(value) for value in list(data["extra_fields"])],
    )


def kl_to_start(batch: KVBatchMeta) -> float:
    """Estimate of KL(policy || reference) in nats per token, from responses that the policy has just sampled.

    Mean over responses of the mean over their tokens of exp(d) - d - 1, d = log pi_ref - log pi (k3 of J. Schulman,
    "Approximating KL divergence", as in verl's ``low_var_kl``).
    """
    names = ["old_log_probs", "ref_log_prob", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names).to_padded_tensor()
    mask_BT = data["response_mask"].to(torch.bool)
    d_BT = (data["ref_log_prob"] - data["old_log_probs"]).masked_fill(~mask_BT, 0.0).to(torch.float64)
    length_B = mask_BT.sum(dim=1)
    kept = length_B > 0  # verl pads a batch with empty rows
    return float(((d_BT.exp() - d_BT - 1).sum(dim=1)[kept] / length_B[kept]).mean())


def outcome_metrics(outcomes: Outcomes, diagnostics: LengthDiagnostics) -> dict[str, float]:
    """Metrics of one training batch.

    Returns:
        ``reward/status/*`` (shares of the responses whose reward reports a status), ``fspo/outcome/{reward,acc}/*``
        (means by the length bins of the current window) and ``fspo/outcome/distinct*`` (diversity within a group).
    """
    length_B, info = outcomes.length_B, outcomes.info_B
    metrics = diagnostics.outcome_metrics("reward", outcomes.reward_B, length_B)
    acc_B = None
    if all("acc" in each for each in info):
        acc_B = torch.tensor([float(each["acc"]) for each in info])
        metrics |= diagnostics.outcome_metrics("acc", acc_B, length_B)
    if any("status" in each for each in info):
        metrics |= status_rates(each.get("status") for each in info)
    return metrics | _distinct_share(outcomes.keys, outcomes.responses, acc_B)


def send_attribute_bins(
    batch: KVBatchMeta, outcomes: Outcomes, names: Sequence[str], max_response_length: int
) -> tuple[KVBatchMeta, tuple[Attribute, ...]]:
    """Add the bin of every sequence by each attribute to the batch in TransferQueue, from where the workers read it.

    Returns:
        The batch with the new column (:data:`~recipe.fspo.recorder.ATTRIBUTE_BINS`) and the attributes.
    """
    attributes, bin_BA = bin_batch(
        names,
        reward_B=outcomes.reward_B,
        group_B=outcomes.group_B,
        truncated_B=outcomes.length_B >= max_response_length,
        data_source_B=outcomes.data_source_B,
    )
    bins = dict(zip(outcomes.keys, bin_BA, strict=True))
    padding_A = torch.zeros(len(names), dtype=torch.int64)  # a row without tokens, which no sum counts
    column_BA = torch.stack([bins.get(key, padding_A) for key in batch.keys])
    column = TensorDict({ATTRIBUTE_BINS: column_BA}, batch_size=len(batch.keys))
    extended = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=column)
    return extended, attributes
