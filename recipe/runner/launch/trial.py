"""One update on a made-up batch, tried before Ray starts: a setting that fails there ends a run at its first update.

The batch has two prompts with two responses each. verl's own functions and those of its registries compute advantages,
rollout correction, KL penalties and the loss with its gradient. A function of the user's may need what only a worker
has. So it is refused for its arguments and for a setting that is not there. Any other failure of it is a note.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fspo.names import did_you_mean

_ACTOR: Final = "actor_rollout_ref.actor"
_LOSS: Final = f"{_ACTOR}.policy_loss.loss_mode"
#: verl's names for an estimate of the KL divergence; it has "full" in its documentation only.
_KL_ESTIMATES: Final = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
#: What verl raises for settings of the actor that it refuses.
_REFUSALS: Final = (
    *(AssertionError, AttributeError, KeyError, TypeError, ValueError),
    *(InstantiationException, OmegaConfBaseException),
)
#: Its functions need nothing but their arguments.
_CERTAIN: Final = "verl."


def problems(config: DictConfig) -> Iterator[str]:
    """What of an update would fail: a sentence each, with the key, its value and what to give instead."""
    yield from estimator_problems(config)
    yield from correction_problems(config)
    yield from _penalty_problems(config)
    yield from _loss_problems(config)


def library_problem(config: DictConfig) -> str | None:
    """Import the modules of ``external_lib``, which register losses and estimators; what is wrong if that fails."""
    library = config.actor_rollout_ref.model.external_lib
    try:
        for module in library if OmegaConf.is_list(library) else [library] if library else []:
            importlib.import_module(str(module))
    except Exception as error:
        return (
            f"actor_rollout_ref.model.external_lib={library} cannot be imported ({type(error).__name__}: {error}): "
            "install its package on every node, or start the command in the folder that holds it"
        )
    return None


def _batch() -> dict[str, Any]:
    """Columns of verl's V1 trainer. The responses have three and two tokens, each prompt a right and a wrong one."""
    import numpy as np
    import torch

    mask_BT = torch.ones(4, 3)
    mask_BT[1::2, 2] = 0
    reward_BT = torch.zeros(4, 3)
    reward_BT[:, 1] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    uid_B = np.array(["a", "a", "b", "b"], dtype=object)
    return {"token_level_rewards": reward_BT, "response_mask": mask_BT, "old_log_probs": -mask_BT, "index": uid_B}


def _failure(call: Callable[[], Any]) -> Exception | None:
    """What a call raises, or None. Nothing that it prints or warns of is shown."""
    try:
        with warnings.catch_warnings(), _without_ray():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def _without_ray() -> Iterator[None]:
    """Ray starts or joins a cluster when a function of it is called first. In a trial such a call fails instead."""
    from ray._private import auto_init_hook

    before, auto_init_hook.enable_auto_connect = auto_init_hook.enable_auto_connect, False
    try:
        yield
    finally:
        auto_init_hook.enable_auto_connect = before


def _is_certain(function: Callable[..., Any], arguments: Mapping[str, Any], error: Exception) -> bool:
    """Whether a function that failed here would fail in a worker, too."""
    if str(inspect.unwrap(function).__module__).startswith(_CERTAIN):
        return True
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError:
        return True
    except ValueError:  # of a compiled function
        return False
    settings, lacking = arguments.get("config"), getattr(error, "obj", None)
    of_settings = lacking in (settings, getattr(settings, "policy_loss", None))
    return isinstance(error, AttributeError) and lacking is not None and of_settings


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _note(setting: str, error: Exception) -> None:
    print(f"note: {setting} was tried on a made-up batch, and failed there: {_in_words(error)}", file=sys.stderr)


# ---------------------------------------------------------------- advantages


def _advantage_failure(config: DictConfig, estimator: str) -> Exception | None:
    """What an estimator raises in verl's V1 trainer, whose ``_compute_advantage`` has a fixed list of columns.

    The trainer's own method is not called: its module imports every engine that is installed.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.utils import need_critic

    function = ADV_ESTIMATOR_REGISTRY[estimator]
    config = copy.deepcopy(config)
    config.algorithm.adv_estimator = estimator
    batch, settings = _batch(), config.algorithm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's, for every estimator but GAE
        batch |= {"values": batch["token_level_rewards"]} if need_critic(config) else {}
    tensors = {name: column for name, column in batch.items() if name != "index"}
    columns = batch | {"batch": tensors, "non_tensor_batch": {"uid": batch["index"]}}
    columns |= {"config": settings, "gamma": settings.gamma, "lam": settings.lam}
    taken = inspect.signature(function).parameters
    return _failure(lambda: function(**{name: columns[name] for name in taken if name in columns}))


def estimator_problems(config: DictConfig) -> Iterator[str]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as REGISTRY

    estimator, is_broken = str(config.algorithm.adv_estimator), library_problem(config) is not None
    setting = f"algorithm.adv_estimator={estimator}"
    if estimator not in REGISTRY:
        if is_broken:  # it may be the one that registers it
            return
        wrong = f"is not known{did_you_mean(estimator, REGISTRY)}"
    elif (failure := _advantage_failure(config, estimator)) is None:
        return
    elif not str(inspect.unwrap(REGISTRY[estimator]).__module__).startswith(_CERTAIN):
        _note(setting, failure)
        return
    else:
        wrong = f"needs columns that verl's V1 trainer, which this run uses, does not have ({_in_words(failure)})"
    computed = [name for name in REGISTRY if _advantage_failure(config, name) is None]
    yield f"{setting} {wrong}: choose one of {', '.join(computed)}"


# ---------------------------------------------------------------- rollout correction, KL penalties


def correction_problems(config: DictConfig) -> Iterator[str]:
    correction = config.algorithm.get("rollout_correction") or {}
    weights, rules = correction.get("rollout_is"), correction.get("rollout_rs")
    if weights is None and rules is None:
        return
    # Here and not above: the module imports verl's engines.
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

    mask_BT = _batch()["response_mask"]
    for key, value, compute in (
        ("rollout_rs", rules, compute_rollout_rejection_mask),
        ("rollout_is", weights, compute_rollout_correction_weights),
    ):
        threshold = correction.get(f"{key}_threshold")
        call = functools.partial(compute, 0 * mask_BT, mask_BT, value, threshold)
        if value is not None and (failure := _failure(call)):
            yield (
                f"algorithm.rollout_correction.{key}={value} with {key}_threshold="
                f"{'null' if threshold is None else threshold}: {failure}"
            )


def _penalty_problems(config: DictConfig) -> Iterator[str]:
    import torch
    from verl.trainer.ppo.core_algos import kl_penalty

    def is_estimated(name: str) -> bool:
        return _failure(lambda: kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name)) is None

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    for key, penalised, estimate in (
        (f"{_ACTOR}.kl_loss_type", actor.use_kl_loss, str(actor.kl_loss_type)),
        ("algorithm.kl_penalty", algorithm.use_kl_in_reward, str(algorithm.kl_penalty)),
    ):
        if penalised and not is_estimated(estimate):
            known = [name for name in _KL_ESTIMATES if is_estimated(name)]
            yield f"{key}={estimate} is nothing that verl computes: choose one of {', '.join(known)}"


# ---------------------------------------------------------------- the loss


def _loss_problems(config: DictConfig) -> Iterator[str]:
    """A loss that nobody registers, or that fails with the actor's settings. Settings that their class refuses are
    named by the job's rules and by verl.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass

    actor = config.actor_rollout_ref.actor
    loss_mode, has_class = actor.policy_loss.get("loss_mode"), actor.policy_loss.get("_target_")
    if library_problem(config) is not None:  # it may be the one that registers it
        return
    settings: Any = None
    try:
        if has_class:
            importlib.import_module(has_class.rpartition(".")[0])
    except Exception:  # the job's rules say so; it may be the one that registers the loss
        return
    with contextlib.suppress(*_REFUSALS):
        settings = omega_conf_to_dataclass(actor)
    if loss_mode not in POLICY_LOSS_REGISTRY:
        known = sorted(POLICY_LOSS_REGISTRY)
        yield (
            f"{_LOSS}={loss_mode} is registered by nobody{did_you_mean(str(loss_mode), known)}: name the module that "
            f"registers it in actor_rollout_ref.model.external_lib or _target_, or choose one of {', '.join(known)}"
        )
    elif has_class and settings is not None:
        function = POLICY_LOSS_REGISTRY[loss_mode]
        arguments = _loss_arguments(settings)
        failure = _failure(lambda: _update(function, arguments))
        if failure is not None and not getattr(failure, "needs_worker", False):  # an exception may say so itself
            setting = f"{_LOSS}={loss_mode}"
            if _is_certain(function, arguments, failure):
                yield f"{setting} would end the run at its first mini-batch: {_in_words(failure)}"
            else:
                _note(setting, failure)


def _loss_arguments(settings: Any) -> dict[str, Any]:
    """What verl hands to a loss. pi has moved from pi_old, by another way for each response."""
    import torch

    mask_BT = _batch()["response_mask"]
    settings.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(mask_BT.sum()),
        global_batch_size=len(mask_BT),
        loss_scale_factor=settings.loss_scale_factor,
    )
    moved_BT = mask_BT * torch.tensor([[0.0], [0.001], [-0.001], [0.0005]])
    return {
        "old_log_prob": -mask_BT,
        "log_prob": (moved_BT - mask_BT).requires_grad_(),
        "advantages": mask_BT * torch.tensor([[1.0], [-1.0], [-1.0], [1.0]]),
        "response_mask": mask_BT,
        "loss_agg_mode": settings.loss_agg_mode,
        "config": settings,
        "rollout_is_weights": None,
    }


def _update(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    import torch

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        value, _ = function(**arguments)
        value.backward()
    if not torch.isfinite(arguments["log_prob"].grad).all():
        raise ValueError("its gradient is not finite")
