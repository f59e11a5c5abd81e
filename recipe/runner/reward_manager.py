"""verl's naive reward manager, with length and problem id of a response. A reward that raises ends the run.

verl logs the exception of a reward function in a worker's file and trains on without that response. Here the first one
ends the run: the manager keeps what went wrong, and the trainer asks for it (:func:`raise_failure`).
"""

from __future__ import annotations

import contextlib
import hashlib
import traceback
from collections.abc import Sequence
from typing import Any, Final

import ray
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from recipe.runner.faults.errors import ExplainedError
from recipe.runner.launch.trials import number

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

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """As verl's, with facts of the response as scalars. Keys returned by the reward function win.

        Raises ExplainedError if the reward function raised, or returned something else than a finite number or a dict
        with one as `score`, and one as `acc` if it has that key.
        """
        item = data[-1:][0]
        tokens = item.batch["responses"]
        length = int(item.batch["attention_mask"][-tokens.shape[-1] :].sum())
        # The object is shared with `data`; data sets without extra_info get an empty one from verl's RLHFDataset.
        row = item.non_tensor_batch
        info, source = row["extra_info"], str(row["data_source"])
        info["response_length"] = length
        if info.get("problem_id") is None:
            # Several files of one source may each count from 0: the tokens tell them apart. A file may have no index.
            prompt = item.batch["prompts"]
            prompt = prompt[item.batch["attention_mask"][: len(prompt)].bool()]
            digest = hashlib.blake2b(prompt.numpy().tobytes(), digest_size=8).hexdigest()
            parts = (source, info.get("index"), digest)
            info["problem_id"] = "/".join(str(part) for part in parts if part is not None)
        try:
            result: dict[str, Any] = await super().run_single(data)
            score = number(result["reward_score"])
            number(result["reward_extra_info"].get("acc", score))  # metrics take means of it
        except Exception as error:
            response = self.tokenizer.decode(tokens[:length], skip_special_tokens=True)
            message = (
                f"the reward {self.config.reward.custom_reward_function.get('path') or 'of verl'} failed on a response "
                f"to data_source={source!r}, extra_info.index={info.get('index', 'unknown')}:\n"
                f"{''.join(traceback.format_exception(error, limit=-3)).rstrip()}\n"
                f"  ground truth: {_short((row.get('reward_model') or {}).get('ground_truth'))}\n"
                f"  response: {_short(response)}\n"
                "A function that is to go on without a verdict catches the exception and returns a score"
            )
            self.failure = self.failure or message
            raise ExplainedError(message) from error
        facts = {"response_length": length, "data_source": source, "problem_id": str(info["problem_id"])}
        result["reward_extra_info"] = {**facts, "score": score, **result["reward_extra_info"]}
        return result


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def raise_failure(workers: Sequence[Any]) -> None:
    """Raise the first failure of a reward function in any of verl's reward workers (handles of Ray actors).

    Where verl waits for the rewards of a whole batch (with a reward model on the policy's GPUs), it has no handles: the
    failure comes out of there by itself. Raises ExplainedError with the worker's message.
    """

    def failure_of(worker: Any) -> str | None:
        return getattr(worker.reward_manager, "failure", None)

    with contextlib.suppress(ray.exceptions.RayError):  # a worker that has died has another reporter
        for failure in ray.get([worker.__ray_call__.remote(failure_of) for worker in workers], timeout=_ASK_S):
            if failure is not None:
                raise ExplainedError(failure)
