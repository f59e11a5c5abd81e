"""verl's reward hook: routes a response to the verifier of its data source.

Configure it with `reward.custom_reward_function.path=pkg://recipe.math.reward` (name `compute_score`). Every reward
worker imports this module, so it imports nothing heavy; math-verify is only ever loaded in `recipe.math.answers`' own
processes, and those only start when a mathematical answer has to be judged.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args, get_type_hints

from fspo.names import did_you_mean
from recipe.math.answers import MathScorer, Status, Verdict, format_reward, soft_overlong_penalty
from recipe.math.answers.truths import no_answer, words_of
from recipe.math.data import offline_task

#: Statuses that are counted one by one as metrics; the string `status` in verl's dumps names all of them.
FLAGS = (Status.TIMEOUT, Status.PARSE_FAILED, Status.CRASHED)

#: See `recipe.runner.launch.reward_function`, as for :func:`settings_problem` and :func:`truth_problems`.
PREPARATION = "python -m recipe.math.data prepare FILE --prompt {prompt} --answer {answer} --out DIR"

#: More words than a policy is likely to write as the author of a ground truth did.
_MOST_WORDS = 3

_creating = threading.Lock()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    format_weight: float = 0.0,
    overlong_buffer: int | None = 0,
    overlong_weight: float = 1.0,
    max_response_length: int | None = None,
    n_workers: int | None = None,
    time_limit_s: float = 1.0,
    memory_limit_mb: int = 1024,
    normalise: bool = True,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score of one response, and what verl should log of it.

    `score = acc + format_weight * format_reward + overlong_weight * soft_overlong_penalty`; with the defaults it is
    `acc`, 1.0 for a correct answer and 0.0 otherwise. Keyword arguments other than verl's own come from
    `+reward.custom_reward_function.reward_kwargs.<name>=<value>`.

    Args:
        data_source, solution_str, ground_truth, extra_info: passed by verl. The offline task has its own
            verifier, everything else goes to math-verify.
        format_weight: weight of `recipe.math.answers.format_reward`.
        overlong_buffer: tokens of DAPO's soft overlong penalty; 0 or None turns it off. Needs `max_response_length` and
            the reward manager of `recipe.runner.reward_manager`, which tells the length of the response in tokens.
        n_workers, time_limit_s, memory_limit_mb: see `recipe.math.answers.MathScorer`; per reward worker of verl.
        normalise: whether mathematical answers are normalised before math-verify judges them; False gives its own
            verdicts.
        kwargs: what verl may pass besides (the address of a reward model, say) is not used.

    Returns:
        The same keys for every data source: `score`; `acc` (what validation reports);
        `timeout`, `parse_failed` and `crashed` (flags, 1.0 or 0.0); `status`, `data_source`,
        `problem_id` (text: in the dumps, not in the metrics); `response_length` in tokens, None without our reward
        manager.

    Raises:
        ValueError: a ground truth that is not text; the overlong penalty is on, but a length is not known.
    """
    if not isinstance(ground_truth, str):
        raise ValueError(
            f"reward_model.ground_truth={ground_truth!r} ({type(ground_truth).__name__}) of data_source={data_source} "
            "is not text, which this reward reads: write every ground truth as text"
        )
    info = extra_info or {}
    if data_source == offline_task.DATA_SOURCE:
        correct = offline_task.score_answer(solution_str, ground_truth) == 1.0
        verdict = Verdict.of(Status.CORRECT if correct else Status.WRONG)
    else:
        with _creating:  # functools.cache alone may call the constructor twice when threads race
            scorer = _scorer(n_workers, time_limit_s, memory_limit_mb, normalise)
        verdict = scorer.score(solution_str, ground_truth)
    length, problem = info.get("response_length"), info.get("problem_id")
    score = verdict.score
    if format_weight:
        score += format_weight * format_reward(solution_str)
    if overlong_buffer:
        if length is None or max_response_length is None:
            raise ValueError(
                f"overlong_buffer={overlong_buffer} needs max_response_length (got {max_response_length}) and the "
                f"response length (got {length}): set reward.reward_manager to recipe.runner.reward_manager"
            )
        score += overlong_weight * soft_overlong_penalty(length, max_response_length, overlong_buffer)
    return {
        "score": score,
        "acc": verdict.score,
        **{flag.value: float(verdict.status is flag) for flag in FLAGS},
        "response_length": length,
        "status": verdict.status.value,
        "data_source": data_source,
        "problem_id": f"{data_source}/{info.get('index')}" if problem is None else str(problem),
    }


def settings_problem(settings: Mapping[str, Any]) -> str | None:
    """What is wrong with `reward_kwargs` for :func:`compute_score`, before Ray starts; None if nothing is."""
    known = compute_score.__kwdefaults__ or {}
    if unknown := [name for name in settings if name not in known]:
        return f"it knows no {unknown[0]}{did_you_mean(unknown[0], known)}; it has {', '.join(known)}"
    types = get_type_hints(compute_score)
    if wrong := [name for name, value in settings.items() if not _fits(value, types[name])]:
        return "; ".join(f"{name}={settings[name]} must be {_in_words(types[name])}" for name in wrong)
    values = known | dict(settings)
    try:
        if values["overlong_buffer"]:
            soft_overlong_penalty(0, values["max_response_length"] or 0, values["overlong_buffer"])
        MathScorer(values["n_workers"], values["time_limit_s"], values["memory_limit_mb"])  # starts no process yet
    except ValueError as error:
        return str(error)
    return None


def truth_problems(truths: Sequence[tuple[str, Any]], settings: Mapping[str, Any]) -> list[str | None]:
    """What is wrong with each (data source, ground truth), so that no response can earn anything; None if nothing.

    A sentence that begins with "note: " is of a ground truth with which only an unlikely response earns something.
    """
    values = (compute_score.__kwdefaults__ or {}) | dict(settings)
    names = "n_workers", "time_limit_s", "memory_limit_mb", "normalise"
    with MathScorer(*(values[name] for name in names)) as scorer, ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda truth: _truth_problem(scorer, *truth), truths))


def _truth_problem(scorer: MathScorer, data_source: str, truth: Any) -> str | None:
    if not isinstance(truth, str):
        return f"is not text ({type(truth).__name__})"
    if data_source == offline_task.DATA_SOURCE:
        return None if truth.strip().isdecimal() else "is not a non-negative integer"
    # Equal texts are equal even if neither can be read, so these are refused for what they are.
    if what := no_answer(truth):
        return f"is {what}, and no answer"
    if any(scorer.score(f"\\boxed{{{other}}}", truth).status is not Status.BAD_TRUTH for other in "0A"):
        return None
    if not scorer.score(f"\\boxed{{{truth}}}", truth).score:
        return "cannot be read as an answer"
    words = words_of(truth)
    return f"note: is {words} words, and only exactly these earn" if words > _MOST_WORDS else None


def _fits(value: Any, kind: Any) -> bool:
    return kind is bool if isinstance(value, bool) else isinstance(value, int | float if kind is float else kind)


def _in_words(kind: Any) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return " or ".join(words.get(part, "null") for part in get_args(kind) or (kind,))


@functools.cache
def _scorer(n_workers: int | None, time_limit_s: float, memory_limit_mb: int, normalise: bool) -> MathScorer:
    return MathScorer(n_workers, time_limit_s, memory_limit_mb, normalise)
