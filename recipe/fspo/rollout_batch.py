"""What became of the responses of a rollout batch, from TransferQueue; and what of it the workers get.

verl's trainer keeps what a reward function returns besides the score (verl 0.9.1 logs it in validation only), so it is
read here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
import transfer_queue as tq
from recipe.fspo.recorder import ROWS
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from fspo.metrics import LengthDiagnostics

#: The one column without tensors that verl's engines read.
# upstream: verl.workers.engine.fsdp.transformer_impl "micro_batch.get("multi_modal_inputs""
_IMAGES: Final = "multi_modal_inputs"


def prompt_of(key: str) -> str:
    """The prompt's identifier in a response's key in TransferQueue: ``{prompt}_{session}_{index}``."""
    return key.split("_")[0]


def response_of(key: str) -> str:
    """A row's response: its key without the last part, because an agent may write one response in several rows."""
    return key.rpartition("_")[0]


@dataclass(frozen=True)
class Outcomes:
    """The responses of one training batch and what became of them, without padding rows."""

    keys: list[str]  # in TransferQueue: ``{prompt}_{session}_{index}``
    length_B: torch.Tensor  # L, in tokens of the model's
    end_B: torch.Tensor  # position after the last token of the model's, 0 without one: what max_response_length limits
    reward_B: torch.Tensor  # float32, as verl's estimators compute it
    data_source_B: list[str]
    info_B: list[dict[str, Any]]  # what the reward function returned besides the score

    @classmethod
    def join(cls, parts: Sequence[Outcomes]) -> Outcomes:
        """The responses of several batches as one."""
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)}
        return cls(
            **{
                name: torch.cat(column) if torch.is_tensor(column[0]) else [value for part in column for value in part]
                for name, column in columns.items()
            }  # type: ignore[arg-type]
        )


def lengths_and_ends(response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L, the number of the model's tokens, and the position after the last of them, 0 without any; [B], int64 each.

    ``response_mask`` is nested, as TransferQueue hands it out: a row per response, 0 for the tokens of others. verl's
    own counts (``response_len`` of its tags, ``response_length/*``) are of all tokens, a tool's too.
    """
    # Where the model's tokens stand, all rows one after another; and how many of them come before each row.
    own, offsets = np.flatnonzero(response_mask.values().numpy()), response_mask.offsets().numpy()
    before = np.searchsorted(own, offsets)
    last = np.append(own, -1)[before[1:] - 1]
    return torch.from_numpy(np.diff(before)), torch.from_numpy(np.maximum(last + 1 - offsets[:-1], 0))


def read_outcomes(batch: KVBatchMeta) -> Outcomes:
    """Read what became of a training batch, as verl's buffer hands it out, from TransferQueue.

    Before verl adds rows of padding, and before its rollout correction, which empties the masks of what it rejects.
    """
    names = ["extra_fields", "data_source", "response_mask", "rm_scores"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    length_B, end_B = lengths_and_ends(data["response_mask"])
    reward_B = data["rm_scores"].to_padded_tensor(0.0).sum(dim=-1)
    source_B = [str(source) for source in list(data["data_source"])]
    further = [getattr(value, "data", value) for value in list(data["extra_fields"])]
    info_B = [(fields.get("reward_extra_info") or {}) if isinstance(fields, dict) else {} for fields in further]
    return Outcomes(list(batch.keys), length_B, end_B, reward_B, source_B, info_B)


def outcome_metrics(outcomes: Outcomes, diagnostics: LengthDiagnostics) -> dict[str, float]:
    """Metrics of one training batch.

    ``fspo/length_trained`` (mean L, in the model's tokens), ``reward/status/*`` (shares of the responses whose reward
    reports a status) and ``fspo/outcome/{reward,acc}/*`` (means by the length bins of the current window).
    """
    metrics = {"fspo/length_trained": float(outcomes.length_B.double().mean())}
    metrics |= diagnostics.outcome_metrics("reward", outcomes.reward_B, outcomes.length_B)
    if all("acc" in facts for facts in outcomes.info_B):
        acc_B = torch.tensor([float(facts["acc"]) for facts in outcomes.info_B])
        metrics |= diagnostics.outcome_metrics("acc", acc_B, outcomes.length_B)
    statuses = Counter(str(facts["status"]) for facts in outcomes.info_B if facts.get("status") is not None)
    return metrics | {f"reward/status/{name}": count / statuses.total() for name, count in statuses.items()}


def number_rows(batch: KVBatchMeta, row_of: dict[str, int]) -> KVBatchMeta:
    """The batch with a new column in TransferQueue, from where the workers read it: which row each sequence is.

    ``row_of`` has the row number by key; a key without one is padding, and gets -1.
    """
    column_B1 = torch.tensor([[row_of.get(key, -1)] for key in batch.keys])
    column = TensorDict({ROWS: column_B1}, [len(batch.keys)])
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=column)


def for_workers(batch: KVBatchMeta) -> KVBatchMeta:
    """The batch with the columns that a worker's engine reads: tensors, and the inputs of images.

    Without a selection verl sends every column of the data set to the workers, and copies it for each micro-batch.
    """
    # upstream: transfer_queue.client:TransferQueueClient.kv_retrieve_meta(keys, partition_id)
    # upstream: transfer_queue.metadata ""is_non_tensor": not is_tensor"
    stored = tq.get_client().kv_retrieve_meta(keys=batch.keys, partition_id=batch.partition_id)
    columns = [name for name, column in stored.field_schema.items() if not column["is_non_tensor"] or name == _IMAGES]
    return KVBatchMeta(batch.keys, batch.tags, batch.partition_id, columns, batch.extra_info)


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
