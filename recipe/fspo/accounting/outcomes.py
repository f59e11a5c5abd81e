"""What became of a step's responses: statuses, reward and accuracy by length.

verl's trainer keeps what a reward function returns besides the score (verl 0.9.1 logs it in validation only), so it is
read here from the batch in TransferQueue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transfer_queue as tq
from recipe.fspo.recorder import ROWS
from recipe.math.answers import status_rates
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from fspo.diagnostics import LengthDiagnostics

#: The one column without tensors that verl's engines read.
_IMAGES: Final = "multi_modal_inputs"
#: What :mod:`recipe.runner.reward_manager` adds to each response; another's score may be another number.
_OF_OUR_MANAGER: Final = {"score", "problem_id", "response_length"}
#: Characters of a response in a warning: about two lines.
_SHOWN: Final = 200


def prompt_of(key: str) -> str:
    """The prompt's identifier in a response's key in TransferQueue: ``{prompt}_{session}_{index}``."""
    return key.split("_")[0]


def response_of(key: str) -> str:
    """A row's response: its key without the last part, because an agent may write one response in several rows."""
    return key.rpartition("_")[0]


def rows_of(batch: KVBatchMeta) -> list[str]:
    """Keys of a batch with verl's tags, without padding rows."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]


def _reward_info(extra_fields: Any) -> dict[str, Any]:
    fields = getattr(extra_fields, "data", extra_fields)
    return (fields.get("reward_extra_info") or {}) if isinstance(fields, dict) else {}


@dataclass(frozen=True)
class Outcomes:
    """The responses of one training batch and what became of them, without padding rows."""

    keys: list[str]  # in TransferQueue: ``{prompt}_{session}_{index}``
    length_B: torch.Tensor  # L, in tokens of the model's
    end_B: torch.Tensor  # position after the last token of the model's, 0 without one; see recorder.end_of_response
    reward_B: torch.Tensor
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

    verl's own counts (``response_len`` of its tags, ``response_length/*``) are of all tokens, a tool's too.

    Args:
        response_mask: Nested, as TransferQueue hands it out: one row per response, 0 for the tokens of others.
    """
    # Where the model's tokens stand, all rows one after another; and how many of them come before each row.
    own, offsets = np.flatnonzero(response_mask.values().numpy()), response_mask.offsets().numpy()
    before = np.searchsorted(own, offsets)
    last = np.append(own, -1)[before[1:] - 1]
    return torch.from_numpy(np.diff(before)), torch.from_numpy(np.maximum(last + 1 - offsets[:-1], 0))


def read_outcomes(batch: KVBatchMeta) -> Outcomes:
    """Read what became of a training batch from TransferQueue: the masks, and otherwise one value a response.

    Args:
        batch: With verl's tags; before verl's rollout correction, which empties the masks of what it rejects.
    """

    def read(names: list[str]) -> Any:
        return tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)

    keys = rows_of(batch)
    data = read(["extra_fields", "data_source", "response_mask"])
    info_B = [_reward_info(value) for value in list(data["extra_fields"])]
    length_B, end_B = lengths_and_ends(data["response_mask"])
    if all(info.keys() >= _OF_OUR_MANAGER for info in info_B):
        reward_B = torch.tensor([float(info["score"]) for info in info_B])
    else:  # another reward manager than this recipe's
        reward_B = torch.tensor([float(scores.sum()) for scores in read(["rm_scores"])["rm_scores"].unbind()])
    source_B = [str(source) for source in list(data["data_source"])]
    return Outcomes(keys, length_B, end_B, reward_B, source_B, info_B)


class EqualRewardsWatch:
    """Says once that the rewards of a step differ in no group, so that no response has a gradient from its reward.

    Args:
        compares: Whether the advantage compares the responses to one prompt; with another one equal rewards may have
            advantages that are not 0.
    """

    def __init__(self, compares: bool) -> None:
        self._compares, self._warned = compares, False

    def warning(
        self,
        step: int,
        outcomes: Outcomes,
        last: Outcomes,
        without_gradient: bool,
        read: Callable[[list[str]], list[str]],
    ) -> str | None:
        """A sentence with two responses, the shortest of two prompts, as they came; None if there is none to be said.

        Args:
            step: Of the run.
            outcomes: Of the step.
            last: Of its last update, whose responses can be read.
            without_gradient: Whether all advantages are exactly 0.
            read: Gives the responses with some keys, as text.
        """
        rewards: dict[str, set[float]] = {}
        for key, reward in zip(outcomes.keys, outcomes.reward_B.tolist(), strict=True):
            rewards.setdefault(prompt_of(key), set()).add(reward)
        differ = any(len(of_prompt) > 1 for of_prompt in rewards.values())
        if self._warned or not rewards or differ or not (self._compares or without_gradient):
            return None
        self._warned = True
        by_length = sorted(range(len(last.keys)), key=last.length_B.tolist().__getitem__)
        shortest: dict[str, int] = {}
        for row in by_length:
            shortest.setdefault(prompt_of(last.keys[row]), row)
        rows = list(dict.fromkeys([*shortest.values(), *by_length]))[:2]
        texts = read([last.keys[row] for row in rows])
        shown = [
            f"  reward {last.reward_B[row]:g}, {last.length_B[row]} tokens: {_shortened(text)}"
            for row, text in zip(rows, texts, strict=True)
        ]
        return "\n".join(
            [
                f"warning: in step {step} all responses to one prompt have the same reward, whatever the prompt: none "
                "has a gradient from it. Two responses:",
                *shown,
                "If one deserves another reward, correct reward.custom_reward_function. If not, give problems that the "
                "model solves sometimes, longer responses (data.max_response_length), or more of them "
                "(actor_rollout_ref.rollout.n)",
            ]
        )


def _shortened(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def read_responses(partition_id: str, tokenizer: Any, keys: list[str]) -> list[str]:
    """Responses as text, with their special tokens, from TransferQueue."""
    tokens = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["responses"])["responses"]
    return [tokenizer.decode(row) for row in tokens.unbind()]


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
        ``reward/status/*`` (shares of the responses whose reward reports a status) and ``fspo/outcome/{reward,acc}/*``
        (means by the length bins of the current window).
    """
    length_B, info = outcomes.length_B, outcomes.info_B
    metrics = diagnostics.outcome_metrics("reward", outcomes.reward_B, length_B)
    if all("acc" in facts for facts in info):
        acc_B = torch.tensor([float(facts["acc"]) for facts in info])
        metrics |= diagnostics.outcome_metrics("acc", acc_B, length_B)
    if any("status" in facts for facts in info):
        metrics |= status_rates(facts.get("status") for facts in info)
    return metrics


def send_rows(batch: KVBatchMeta, outcomes: Outcomes, first_row: int) -> KVBatchMeta:
    """Add to the batch in TransferQueue, from where the workers read it, which row each sequence is.

    Returns:
        The batch with the new column (:data:`~recipe.fspo.recorder.ROWS`: position in ``outcomes``, counted from
        ``first_row``).
    """
    row = {key: first_row + index for index, key in enumerate(outcomes.keys)}
    column_B1 = torch.tensor([[row.get(key, -1)] for key in batch.keys])  # -1: padding, which has no token
    column = TensorDict({ROWS: column_B1}, [len(batch.keys)])
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=column)


def for_workers(batch: KVBatchMeta) -> KVBatchMeta:
    """The batch with the columns that a worker's engine reads: tensors, and the inputs of images.

    Without a selection verl sends every column of the data set to the workers, and copies it for each micro-batch.
    """
    stored = tq.get_client().kv_retrieve_meta(keys=batch.keys, partition_id=batch.partition_id)
    columns = [name for name, column in stored.field_schema.items() if not column["is_non_tensor"] or name == _IMAGES]
    return KVBatchMeta(batch.keys, batch.tags, batch.partition_id, columns, batch.extra_info)


def outcome_columns(outcomes: Outcomes, row_B: npt.NDArray[np.int64]) -> dict[str, Any]:
    """What a rollout batch adds to the rows of its mini-batches (:data:`fspo.table.SCHEMA`).

    Args:
        outcomes: Of the rollout batch.
        row_B: Which of its responses each row is.

    Returns:
        By row: ``prompt``, the identifier of the prompt group; ``id``, which verl's dumps of responses have as ``uid``;
        ``reward``; ``data_source``.
    """
    columns = {
        "prompt": [prompt_of(key) for key in outcomes.keys],
        "id": outcomes.keys,
        "data_source": outcomes.data_source_B,
    }
    rows = {name: np.array(values, dtype=object)[row_B] for name, values in columns.items()}
    return rows | {"reward": outcomes.reward_B.numpy()[row_B]}
