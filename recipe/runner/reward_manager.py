"""verl's naive reward manager, with length and problem id of a response. A reward that raises ends the run.

verl logs the exception of a reward function in a worker's file and trains on without that response. Here the first one
ends the run: the manager keeps what went wrong, and the trainer asks for it (:func:`raise_failure`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any, Final

import ray
import torch
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from recipe.runner.faults.errors import ExplainedError
from recipe.runner.launch.reward_function import BadReward, describe, result_problem

_SHOWN: Final = 300  # characters of a response and a ground truth in a message
_ASK_S: Final = 30.0


class TokenLengthRewardManager(NaiveRewardManager):
    """Adds what an evaluation reads of a response, and keeps the first failure of the reward function.

    ``extra_info`` gets `response_length` (tokens) and a missing `problem_id` before the reward function runs. Configure
    it with `reward.reward_manager.source=importlib`, `reward.reward_manager.name=TokenLengthRewardManager` and
    `reward.reward_manager.module.path=pkg://recipe.runner.reward_manager`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failure: str | None = None
        self._kinds: dict[str, str] = {}  # of what the reward has returned, by key

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """As verl's, with facts of the response as scalars. Keys returned by the reward function win.

        Raises:
            ExplainedError: the reward function raised, or returned something else than a finite number or a dict with
                one as `score`.
        """
        item = data[-1:][0]
        tokens = item.batch["responses"]
        mask = item.batch["attention_mask"][-tokens.shape[-1] :]
        # The object is shared with `data`; data sets without extra_info get an empty one from verl's RLHFDataset.
        row = item.non_tensor_batch
        info, source = row["extra_info"], str(row["data_source"])
        info["response_length"] = int(mask.sum())
        prompt = item.batch["prompts"]
        prompt = prompt[item.batch["attention_mask"][: len(prompt)].bool()]
        if info.get("problem_id") is None:
            info["problem_id"] = _problem_id(source, info.get("index"), prompt)
        try:
            result: dict[str, Any] = await super().run_single(data)
            returned = result["reward_extra_info"]  # of a reward that returns a number, that number as acc
            returned = returned if "score" in returned else result["reward_score"]
            if (wrong := result_problem(returned, self._kinds)) is not None:
                raise BadReward(wrong)
        except Exception as error:
            response = self.tokenizer.decode(tokens[: int(mask.sum())], skip_special_tokens=True)
            message = self._message(row, response, error)
            self.failure = self.failure or message
            raise ExplainedError(message) from error
        facts = {"response_length": int(mask.sum()), "data_source": source, "problem_id": str(info["problem_id"])}
        facts["score"] = float(result["reward_score"])
        result["reward_extra_info"] = facts | result["reward_extra_info"]
        return result

    def _message(self, row: dict[str, Any], response: str, error: Exception) -> str:
        custom = self.config.reward.custom_reward_function
        which = f"{custom.get('name')} of {custom.get('path')}" if custom.get("path") else "verl's own reward"
        index = row["extra_info"].get("index", "unknown")
        reason = str(error) if isinstance(error, BadReward) else f"it raised {describe(error)}"
        truth = (row.get("reward_model") or {}).get("ground_truth")
        return (
            f"the reward function ({which}) failed on a response to data_source={str(row.get('data_source'))!r}, "
            f"extra_info.index={index}: {reason}\n"
            f"  ground truth: {_short(truth)}\n  response: {_short(response)}\n"
            "A function that is to go on without a verdict catches the exception and returns a score"
        )


def _problem_id(source: str, index: Any, prompt: torch.Tensor) -> str:
    """Groups the responses to a problem. Several files of one source may each count from 0: the tokens tell them apart.

    None where the file has no index, as verl joins rows of files with and without.
    """
    digest = hashlib.blake2b(prompt.numpy().tobytes(), digest_size=8).hexdigest()
    return "/".join(str(part) for part in (source, index, digest) if part is not None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _failure_of(worker: Any) -> str | None:
    return getattr(worker.reward_manager, "failure", None)


def raise_failure(workers: Sequence[Any]) -> None:
    """Raise the first failure of a reward function in any of verl's reward workers (handles of Ray actors).

    Where verl waits for the rewards of a whole batch (with a reward model on the policy's GPUs), it has no handles: the
    failure comes out of there by itself.

    Raises:
        ExplainedError: with the worker's message.
    """
    with contextlib.suppress(ray.exceptions.RayError):  # a worker that has died has another reporter
        for failure in ray.get([worker.__ray_call__.remote(_failure_of) for worker in workers], timeout=_ASK_S):
            if failure is not None:
                raise ExplainedError(failure)
