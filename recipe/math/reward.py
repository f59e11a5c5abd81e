"""verl's reward hook: routes a response to the verifier of its data source.

Configure it with `reward.custom_reward_function.path=pkg://recipe.math.reward` (name `compute_score`). It is light:
math-verify is loaded in processes of `recipe.math.answers`, when an answer has to be judged.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping
from typing import Any

from recipe.math.answers import MathScorer, Status
from recipe.math.data import offline_task

_creating = threading.Lock()  # functools.cache alone may call a function twice when threads race


@functools.cache
def _scorer(pid: int, n_workers: int | None, time_limit_s: float) -> MathScorer:
    """The scorer of a process: a forked one has none yet."""
    return MathScorer(n_workers, time_limit_s)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    overlong_buffer: int | None = 0,
    overlong_weight: float = 1.0,
    max_response_length: int | None = None,
    n_workers: int | None = None,
    time_limit_s: float = 3.0,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
) -> dict[str, Any]:
    """Score of one response, and what verl should log of it.

    `score = acc + overlong_weight * soft_overlong_penalty`, where `acc` is 1.0 for a correct answer and else 0.0.

    Args:
        data_source, solution_str, ground_truth, extra_info: of verl. The offline task has its own verifier.
        overlong_buffer: tokens of DAPO's soft overlong penalty; 0 or None turns it off. Needs `max_response_length` and
            the reward manager of `recipe.runner.reward_manager`, which tells the length of the response in tokens.
        n_workers, time_limit_s: see `recipe.math.answers.MathScorer`; per reward worker of verl.
        reward_router_address, reward_model_tokenizer: passed by verl beside a reward model, not used.

    Returns:
        The same keys for every data source: `score`; `acc` (what validation reports); `timeout`, `parse_failed` and
        `crashed` (1.0 or 0.0: metrics); `status`, `data_source`, `problem_id` (text: in the dumps);
        `response_length` in tokens, None without our reward manager.

    Raises:
        ValueError: a ground truth that is not text; the overlong penalty is on, but a length is not known or the
            buffer is longer than the longest response.
    """
    if not isinstance(ground_truth, str):
        raise ValueError(f"reward_model.ground_truth={ground_truth!r} of {data_source}: write it as text")
    info = extra_info or {}
    if data_source == offline_task.DATA_SOURCE:
        status = Status.CORRECT if offline_task.score_answer(solution_str, ground_truth) else Status.WRONG
    else:
        with _creating:
            scorer = _scorer(os.getpid(), n_workers, time_limit_s)
        status = scorer.judge(solution_str, ground_truth)
    length, score = info.get("response_length"), status.score
    if overlong_buffer:
        if length is None or max_response_length is None:
            raise ValueError(
                f"overlong_buffer={overlong_buffer} needs max_response_length (got {max_response_length}) and the "
                f"response length (got {length}): set reward.reward_manager to recipe.runner.reward_manager"
            )
        score += overlong_weight * soft_overlong_penalty(length, max_response_length, overlong_buffer)
    return {
        "score": score,
        "acc": status.score,
        **{flag.value: float(status is flag) for flag in (Status.TIMEOUT, Status.PARSE_FAILED, Status.CRASHED)},
        "response_length": length,
        "status": status.value,
        "data_source": data_source,
        "problem_id": str(info.get("problem_id") or f"{data_source}/{info.get('index')}"),
    }


def soft_overlong_penalty(response_length: int, max_response_length: int, buffer_length: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), in [-1, 0].

    With `L_max = max_response_length`, `L_cache = buffer_length` and L the response length, all in tokens: 0 up to
    `L_max - L_cache`, then `((L_max - L_cache) - L) / L_cache`, and -1 beyond `L_max`.

    Raises ValueError for a buffer outside (0, max_response_length].
    """
    if not 0 < buffer_length <= max_response_length:
        raise ValueError(f"overlong_buffer={buffer_length} must be in (0, max_response_length={max_response_length}]")
    return min(0.0, max(-1.0, (max_response_length - buffer_length - response_length) / buffer_length))
