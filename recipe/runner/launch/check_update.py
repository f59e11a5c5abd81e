"""The loss of a command, tried before Ray: one that nobody registers, or that fails, ends a run at its first update."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from omegaconf import DictConfig

_LOSS: Final = "actor_rollout_ref.actor.policy_loss.loss_mode"
_LIBRARY: Final = "actor_rollout_ref.model.external_lib"


def loss_problem(config: DictConfig) -> str | None:
    """Why the loss that a configuration names would end a run at its first mini-batch; None if it would not.

    A loss of the user's may need what only a worker has: it is refused for its arguments and for what it returns, and
    any other failure is printed as a note.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass

    actor, library = config.actor_rollout_ref.actor, config.actor_rollout_ref.model.external_lib
    try:
        for module in [library] if isinstance(library, str) else library or ():
            importlib.import_module(str(module))
    except (Exception, SystemExit) as error:
        return f"{_LIBRARY}={library} cannot be imported ({_in_words(error)})"
    loss_mode, target = actor.policy_loss.loss_mode, str(actor.policy_loss.get("_target_"))
    refused = f"actor_rollout_ref.actor.policy_loss._target_={target}"
    try:
        importlib.import_module(target.rpartition(".")[0])  # it may register the loss
    except (Exception, SystemExit) as error:
        return f"{refused} cannot be imported ({_in_words(error)})"
    if loss_mode not in POLICY_LOSS_REGISTRY:
        known = ", ".join(sorted(POLICY_LOSS_REGISTRY))
        return (
            f"{_LOSS}={loss_mode} is registered by nobody: name the module that registers it in {_LIBRARY}, or choose "
            f"one of {known}"
        )
    try:
        settings = omega_conf_to_dataclass(actor)
    except Exception as error:
        return f"{refused}: {' '.join(str(error.__cause__ or error).split())}"
    function = POLICY_LOSS_REGISTRY[loss_mode]
    arguments = _arguments(settings)
    try:
        _update(function, arguments)
    except (Exception, SystemExit) as error:
        if getattr(error, "needs_worker", False):  # an exception may say so itself
            return None
        # verl's and this repository's need nothing else than they get here.
        is_ours = inspect.unwrap(function).__module__.startswith(("verl.", "fspo."))
        if is_ours or isinstance(error, _ResultError) or not _takes(function, arguments):
            return f"{_LOSS}={loss_mode} would end the run at its first mini-batch: {_in_words(error)}"
        print(f"note: {_LOSS}={loss_mode} failed on a made-up batch: {_in_words(error)}", file=sys.stderr, flush=True)
    return None


class _ResultError(ValueError):
    """A loss has returned what verl cannot use."""


def _takes(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError:
        return False
    except ValueError:  # a compiled function has no signature
        pass
    return True


def _arguments(settings: Any) -> dict[str, Any]:
    """What verl hands to a loss, of four made-up responses; ``settings`` of the actor."""
    import torch

    draw = torch.Generator().manual_seed(1)
    mask_BT = (torch.arange(5) < torch.tensor([5, 2, 4, 1])[:, None]).float()
    settings.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(mask_BT.sum()),
        global_batch_size=len(mask_BT),
        loss_scale_factor=settings.loss_scale_factor,
    )
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


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
