"""What verl computes between a rollout and an update, tried on made-up numbers before Ray starts.

A setting that verl reads only there ends a run after its first rollout. Only verl's own functions are tried: one of the
user's may need what there is in a worker alone.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

from omegaconf import DictConfig

_ACTOR: Final = "actor_rollout_ref.actor"
#: verl's names for an estimate of the KL divergence; it has "full" in its documentation only.
_KL_ESTIMATES: Final = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
#: What verl raises for a setting or a column that it lacks.
_FAILURES: Final = (AssertionError, AttributeError, KeyError, NotImplementedError, TypeError, ValueError)


def _is_verls(function: Callable[..., Any] | None) -> bool:
    return function is not None and function.__module__.startswith("verl.")


def is_computed(config: DictConfig, estimator: str) -> bool:
    """Whether verl's V1 trainer can compute the advantages of ``algorithm.adv_estimator=estimator``.

    Its ``_compute_advantage`` reads a fixed list of columns from the rollout batch, and some estimators need others.
    One that verl has not registered itself passes untried. The trainer's own method is not called: its module imports
    every engine that is installed.
    """
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.utils import need_critic

    function = ADV_ESTIMATOR_REGISTRY[estimator]
    if not _is_verls(function):
        return True
    config = copy.deepcopy(config)
    config.algorithm.adv_estimator = estimator
    mask_BT = torch.ones(4, 3)  # two prompts, two responses each
    mask_BT[1::2, 2] = 0
    reward_BT = torch.zeros(4, 3)
    reward_BT[:, 1] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    uid_B = np.array(["a", "a", "b", "b"], dtype=object)
    tensors = {"token_level_rewards": reward_BT, "response_mask": mask_BT, "old_log_probs": -mask_BT}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's, for every estimator but GAE
        tensors |= {"values": reward_BT} if need_critic(config) else {}
    settings = config.algorithm
    columns = tensors | {"index": uid_B, "batch": tensors, "non_tensor_batch": {"uid": uid_B}}
    columns |= {"config": settings, "gamma": settings.gamma, "lam": settings.lam}
    try:
        function(**{name: columns[name] for name in inspect.signature(function).parameters if name in columns})
    except _FAILURES:
        return False
    return True


def problems(config: DictConfig) -> Iterator[str]:
    """Estimates of the KL divergence that verl cannot compute, and settings with which a loss of verl's fails."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, kl_penalty

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    for key, penalised, estimate in (
        (f"{_ACTOR}.kl_loss_type", actor.use_kl_loss, str(actor.kl_loss_type)),
        ("algorithm.kl_penalty", algorithm.use_kl_in_reward, str(algorithm.kl_penalty)),
    ):
        if penalised and not _estimates_kl(kl_penalty, estimate):
            known = [name for name in _KL_ESTIMATES if _estimates_kl(kl_penalty, name)]
            yield f"{key}={estimate} is nothing that verl computes: choose one of {', '.join(known)}"
    loss_mode, has_class = actor.policy_loss.get("loss_mode"), actor.policy_loss.get("_target_")
    if has_class and _is_verls(POLICY_LOSS_REGISTRY.get(loss_mode)) and (failure := _loss_failure(actor)):
        yield f"{_ACTOR}.policy_loss.loss_mode={loss_mode} would end the run at its first mini-batch: {failure}"


def _estimates_kl(kl_penalty: Callable[..., Any], estimate: str) -> bool:
    import torch

    try:
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), estimate)
    except NotImplementedError:
        return False
    return True


def _loss_failure(actor: DictConfig) -> str:
    """What a loss of verl's raises with the actor's settings; an empty text if nothing, or if verl refuses these."""
    import torch
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    try:
        settings = omega_conf_to_dataclass(actor)
    except (*_FAILURES, InstantiationException):
        return ""
    settings.global_batch_info.update(
        dp_size=1, batch_num_tokens=6, global_batch_size=2, loss_scale_factor=settings.loss_scale_factor
    )
    mask_BT = torch.ones(2, 3)
    advantage_BT = mask_BT * torch.tensor([[1.0], [-1.0]])
    arguments = {"old_log_prob": -mask_BT, "log_prob": -mask_BT, "advantages": advantage_BT, "response_mask": mask_BT}
    try:
        get_policy_loss_fn(actor.policy_loss.loss_mode)(
            **arguments, loss_agg_mode=settings.loss_agg_mode, config=settings, rollout_is_weights=None
        )
    except _FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""
