"""Loss, names and reward of a command, tried before Ray: on made-up responses, and on rows of the run's data.

``python -m recipe.runner.launch.trials ANSWER`` tries a user's reward in a process of its own, which ends with whatever
the module has started. Configuration and rows come pickled by standard input, because secrets may be among them.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.check_data import rows_to_try
from recipe.runner.launch.settings import MachineProblem

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_LOSS: Final = f"{_ACTOR}.policy_loss.loss_mode"
_LIBRARY: Final = f"{_MODEL}.external_lib"
#: Files that could register an agent loop.
_REGISTERS: Final = (
    *(f"{_ROLLOUT}.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path")),
    *(f"{_ROLLOUT}.agent.agent_loop_config_path", "data.custom_cls.path", f"{_MODEL}.external_lib"),
)
#: Rewards and managers that start with this are this repository's, and start nothing when they are imported.
_RECIPES: Final = "pkg://recipe."
#: For the import and all calls; some modules load a model while they are imported.
_LIMIT_S: Final = 300

Row = tuple[str, Mapping[str, Any]]


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def loss_problem(config: DictConfig) -> str | None:
    """Why the loss that a configuration names would end a run at its first mini-batch; None if it would not.

    A loss of the user's may need what only a worker has: it is refused for its arguments and for what it returns, and
    any other failure is printed as a note.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass

    actor, library = config.actor_rollout_ref.actor, config.actor_rollout_ref.model.external_lib
    loss_mode = actor.policy_loss.loss_mode
    try:
        for module in [library] if isinstance(library, str) else library or ():
            importlib.import_module(str(module))
    except (Exception, SystemExit) as error:
        return f"{_LIBRARY}={library} cannot be imported ({_in_words(error)})"
    try:
        settings = omega_conf_to_dataclass(actor)  # the module of its class may register the loss, too
    except Exception as error:
        return f"{_ACTOR}: {' '.join(str(error).split())}"
    if loss_mode not in POLICY_LOSS_REGISTRY:
        known = ", ".join(sorted(POLICY_LOSS_REGISTRY))
        return (
            f"{_LOSS}={loss_mode} is registered by nobody: name the module that registers it in {_LIBRARY}, or choose "
            f"one of {known}"
        )
    function, arguments = POLICY_LOSS_REGISTRY[loss_mode], _arguments(settings)
    try:
        _update(function, arguments)
    except (Exception, SystemExit) as error:
        if getattr(error, "needs_worker", False):  # an exception may say so itself
            return None
        # verl's and this repository's need nothing else than they get here.
        is_ours = str(inspect.unwrap(function).__module__).startswith(("verl.", "fspo."))
        if is_ours or isinstance(error, _ResultError) or not _takes(function, arguments):
            return f"{_LOSS}={loss_mode} would end the run at its first mini-batch: {_in_words(error)}"
        print(f"note: {_LOSS}={loss_mode} failed on a made-up batch: {_in_words(error)}", file=sys.stderr, flush=True)
    return None


class _ResultError(ValueError):
    """A loss has returned what verl cannot use."""


def _takes(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    try:
        return inspect.signature(function).bind(**arguments) is not None
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # a compiled function does not tell its arguments


def _arguments(settings: Any) -> dict[str, Any]:
    """What verl hands to a loss, of four made-up responses; ``settings`` of the actor."""
    import torch

    draw = torch.Generator().manual_seed(1)
    mask_BT = (torch.arange(5) < torch.tensor([5, 2, 4, 1])[:, None]).float()
    sizes = {"dp_size": 1, "batch_num_tokens": int(mask_BT.sum()), "global_batch_size": len(mask_BT)}
    settings.global_batch_info.update(sizes, loss_scale_factor=settings.loss_scale_factor)
    old_BT = -5 * torch.rand(4, 5, generator=draw) * mask_BT
    return {
        "old_log_prob": old_BT,
        "log_prob": ((old_BT + 0.001 * torch.randn(4, 5, generator=draw)) * mask_BT).requires_grad_(),
        "advantages": torch.tensor([3.0, -1.0, 2.0, 0.0])[:, None] * mask_BT,
        "response_mask": mask_BT,
        "loss_agg_mode": settings.loss_agg_mode,
        "config": settings,
        "rollout_is_weights": None,
    }


def _update(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Call a loss and use what it returns, as verl's ``ppo_loss`` does."""
    import torch
    from verl.utils.metric import AggregationType, Metric

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        result = function(**arguments)
        try:
            value, metrics = result
            Metric.from_dict(metrics, AggregationType.MEAN)
            Metric(AggregationType.SUM, value)
            value.backward()
        except Exception as error:
            raise _ResultError(
                f"{_in_words(error)}. A loss returns two things: its value, a tensor of one number with a gradient, "
                "and its metrics, a dictionary of numbers"
            ) from error
    if not torch.isfinite(arguments["log_prob"].grad).all():
        raise ValueError("its gradient is not finite")


def name_problems(config: DictConfig) -> Iterator[str]:
    """Names of functions of verl's that nobody registers, and a correction whose threshold it cannot use."""
    import torch
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as loops
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, kl_penalty

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loop = str(config.actor_rollout_ref.rollout.agent.default_agent_loop)
    if loop not in loops and not any(OmegaConf.select(config, key) for key in _REGISTERS):
        yield f"{_ROLLOUT}.agent.default_agent_loop={loop} is registered by nobody: give one of {', '.join(loops)}"
    if (estimator := str(algorithm.adv_estimator)) not in ADV_ESTIMATOR_REGISTRY:
        yield f"algorithm.adv_estimator={estimator} is not known: choose one of {', '.join(ADV_ESTIMATOR_REGISTRY)}"
    zeros_BT, correction = torch.zeros(1, 2), algorithm.get("rollout_correction") or {}

    def corrected(key: str, function: str) -> None:
        from verl.trainer.ppo import rollout_corr_helper  # imports verl's engines

        threshold = correction.get(f"{key}_threshold")
        getattr(rollout_corr_helper, function)(zeros_BT, zeros_BT + 1, correction[key], threshold)

    loss_type, penalty = actor.use_kl_loss and actor.kl_loss_type, algorithm.use_kl_in_reward and algorithm.kl_penalty
    weights, rules = correction.get("rollout_is"), correction.get("rollout_rs")
    of = "algorithm.rollout_correction"
    for key, name, call in (
        (f"{_ACTOR}.kl_loss_type", loss_type, lambda: kl_penalty(zeros_BT, zeros_BT, loss_type)),
        ("algorithm.kl_penalty", penalty, lambda: kl_penalty(zeros_BT, zeros_BT, penalty)),
        (f"{of}.rollout_is", weights, lambda: corrected("rollout_is", "compute_rollout_correction_weights")),
        (f"{of}.rollout_rs", rules, lambda: corrected("rollout_rs", "compute_rollout_rejection_mask")),
    ):
        try:
            if name:
                call()
        except (Exception, SystemExit) as error:
            yield f"{key}={name}: {' '.join(str(error).split()) or type(error).__name__}"


def reward_problems(config: DictConfig) -> Iterator[str]:
    """A reward or its manager that verl could not load or call, or that raises on rows of the data."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    reward, own, manager = config.reward, config.reward.custom_reward_function, config.reward.reward_manager
    try:
        resolve_reward_manager_cls(config)
    except Exception as error:
        known = ", ".join(sorted(REWARD_MANAGER))
        yield f"reward.reward_manager.name={manager.name} with source={manager.source}: {error}; verl has {known}"
        return
    # A manager of the user's calls it as it likes, and a server that it asks is not there yet: it is loaded only.
    users_manager = manager.source == "importlib" and not str(manager.module.path).startswith(_RECIPES)
    asks = reward.reward_model.enable or OmegaConf.select(reward, "sandbox_fusion.url")
    rows = [] if users_manager or asks else rows_to_try(config.data)
    is_users = own.path and not str(own.path).startswith(_RECIPES)
    plain = {"reward": OmegaConf.to_container(reward, resolve=True)}
    kind, said = (_asked if is_users else tried)(plain, rows)
    sentence = f"reward.custom_reward_function.path={own.path}, name={own.name}: {said}"
    if kind == "note":
        print(f"note: {sentence}", file=sys.stderr, flush=True)
    elif said:  # what a call asks may be on the run's machine
        yield MachineProblem(sentence) if kind == "call" else sentence


def _asked(reward: Mapping[str, Any], rows: Sequence[Row]) -> tuple[str, str]:
    """:func:`tried` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+b") as log:
        answer = Path(folder, "answer")
        command, given = [sys.executable, "-m", __name__, str(answer)], pickle.dumps((reward, list(rows)))
        try:
            ended = subprocess.run(command, input=given, stdout=log, stderr=log, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return "call", f"it has not been imported and called within {_LIMIT_S} s"
        if not answer.exists():
            log.seek(0)
            last = log.read().decode(errors="replace").strip()[-2000:]
            return "load", f"the process that imported it ended with status {ended.returncode}: {last}"
        kind, said = json.loads(answer.read_text(encoding="utf-8"))
        return kind, said


def tried(reward: Mapping[str, Any], rows: Sequence[Row]) -> tuple[str, str]:
    """``load`` or ``call`` and why that fails; or ``note`` and what is worth one; or two empty texts.

    ``reward`` is the group of that name in plain containers. Each row is tried with the usual forms of its ground truth
    and with an empty response.
    """
    try:
        function = _loaded(reward)
    except (Exception, SystemExit) as error:
        said = _in_words(error.__cause__ or error)  # of verl's error that of the module
        return "load", f"it cannot be loaded ({said}): correct path, name or file, or install what it imports"
    earned, place = dict[str, bool](), ""
    try:
        for where, row in rows:
            scores = []
            for text in ("", *forms(_truth(row)).values()):
                place = f"{where}, response {text!r}"
                scores.append(_score(function, row, text))
            source = str(row["data_source"])
            earned[source] = earned.get(source, False) or max(scores) > scores[0]
    except (Exception, SystemExit) as error:
        return "call", f"{place}: {''.join(traceback.format_exception(error, limit=-3)).rstrip()}"
    if unearned := ", ".join(source for source, is_earned in earned.items() if not is_earned):
        return "note", f"no usual form of the ground truth earns more than an empty response: data_source={unearned}"
    return "", ""


def _loaded(reward: Mapping[str, Any]) -> Callable[..., Any]:
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import get_default_compute_score

    config = OmegaConf.create(dict(reward))
    own = get_custom_reward_fn(config)
    return own or get_default_compute_score(config.reward.reward_manager.name)  # type: ignore[no-any-return]


def _truth(row: Mapping[str, Any]) -> Any:
    return row["reward_model"].get("ground_truth")


def forms(truth: Any) -> dict[str, str]:
    """How responses usually write an answer, by name; of a list the first."""
    while isinstance(truth, list | tuple) and truth:
        truth = truth[0]
    usual = {"bare": "{}", "\\boxed{}": "\\boxed{{{}}}", "The answer is": "The answer is {}.", "####": "#### {}"}
    return {name: form.format(truth) for name, form in usual.items()}


def number(score: Any) -> float:
    """A score as a number. Raises ValueError or TypeError if it is none, or not finite."""
    if isinstance(score, str) or not math.isfinite(score):
        raise ValueError(f"the reward is {score!r}, which is not a finite number")
    return float(score)


def _score(function: Callable[..., Any], row: Mapping[str, Any], response: str) -> float:
    """The score of a response; called as verl's manager does, in a thread."""
    # What the manager adds.
    added = {"num_turns": 2, "rollout_reward_scores": {}, "response_length": len(response)}
    arguments = {
        "data_source": row["data_source"],
        "solution_str": response,
        "ground_truth": _truth(row),
        "extra_info": {**(row.get("extra_info") or {}), **added},
    }
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(lambda: function(**arguments)).result()
    result = asyncio.run(result) if inspect.iscoroutine(result) else result
    facts = result if isinstance(result, dict) else {"score": result}
    score = number(facts["score"])
    number(facts.get("acc", score))  # as the manager
    return score


def scores_of_the_usual_forms(config: DictConfig, rows: Sequence[Row]) -> dict[str, float]:
    """What the forms of the first row's truth score; empty if the reward is not the recipe's own."""
    if not rows or not str(config.reward.custom_reward_function.path).startswith(_RECIPES):
        return {}
    function = _loaded({"reward": OmegaConf.to_container(config.reward, resolve=True)})
    return {name: _score(function, rows[0][1], text) for name, text in forms(_truth(rows[0][1])).items()}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(tried(*pickle.loads(sys.stdin.buffer.read()))), encoding="utf-8")
    os._exit(0)  # whatever the module has started
