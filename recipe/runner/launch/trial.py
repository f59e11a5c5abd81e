"""One update on a made-up batch, tried before Ray starts: a setting that fails there ends a run at its first update.

The batch has four prompts with two responses each. verl's own functions and those of its registries compute advantages,
rollout correction, KL penalties and the loss with its gradient; they make the optimizer, too. A function of the user's
may need what only a worker has. So it is refused for its arguments and for a setting that is not there. Any other
failure of it is a note.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.launch.attempt import INSTALL, attempt, in_words
from recipe.runner.launch.compose import as_written
from recipe.runner.launch.values import MachineProblem

_ACTOR: Final = "actor_rollout_ref.actor"
_LOSS: Final = f"{_ACTOR}.policy_loss.loss_mode"
_MTP: Final = "actor_rollout_ref.model.mtp.enable"
#: verl's names for an estimate of the KL divergence; it has "full" in its documentation only.
_KL_ESTIMATES: Final = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
#: The forms of verl's thresholds.
_IS_THRESHOLD: Final = "an upper bound such as 2.0, or both bounds such as 0.5_2.0"
_RS_THRESHOLD: Final = "both bounds of a rule k1, such as 0.5_2.0, and the upper bound of k2 and k3"
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
    yield from loss_problems(config)
    yield from _optimizer_problems(config)


def library_problem(config: DictConfig) -> str | None:
    """Import the modules of ``external_lib``, which register losses and estimators; what is wrong if that fails."""
    library = config.actor_rollout_ref.model.external_lib
    for module in library if OmegaConf.is_list(library) else [library] if library else []:
        if error := attempt(functools.partial(importlib.import_module, str(module)))[1]:
            return f"actor_rollout_ref.model.external_lib={library} cannot be imported ({in_words(error)}): {INSTALL}"
    return None


def _batch() -> dict[str, Any]:
    """Columns of verl's V1 trainer: four prompts with two responses each, whose last token has the reward.

    The responses differ in length. The rewards of the last two prompts are equal.
    """
    import numpy as np
    import torch

    length_B = torch.tensor([3, 2, 4, 3, 5, 2, 6, 7])
    mask_BT = (torch.arange(7) < length_B[:, None]).float()
    reward_BT = torch.zeros_like(mask_BT)
    reward_BT[torch.arange(8), length_B - 1] = torch.tensor([1.0, 0.0, 0.25, 0.75, 1.0, 1.0, 0.5, 0.5])
    uid_B = np.array([*"aabbccdd"], dtype=object)
    return {"token_level_rewards": reward_BT, "response_mask": mask_BT, "old_log_probs": -mask_BT, "index": uid_B}


class ResultError(ValueError):
    """A function has returned what verl cannot use."""


def _is_certain(function: Callable[..., Any], arguments: Mapping[str, Any], error: BaseException) -> bool:
    """Whether a function that failed here would fail in a worker, too."""
    if isinstance(error, ResultError) or str(inspect.unwrap(function).__module__).startswith(_CERTAIN):
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


def _note(setting: str, error: BaseException) -> None:
    print(f"note: {setting} {_failed_here(error)}", file=sys.stderr)


def _failed_here(error: BaseException) -> str:
    return f"was tried on a made-up batch, and failed there: {in_words(error)}"


# ---------------------------------------------------------------- advantages


def _advantages(config: DictConfig, estimator: str, batch: dict[str, Any]) -> Any:
    """A by an estimator in verl's V1 trainer, [B, T], whose ``_compute_advantage`` has a fixed list of columns.

    The trainer's own method is not called: its module imports every engine that is installed.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.utils import need_critic

    function = ADV_ESTIMATOR_REGISTRY[estimator]
    if estimator != config.algorithm.adv_estimator:
        config = copy.deepcopy(config)
        config.algorithm.adv_estimator = estimator
    settings = config.algorithm
    batch |= {"values": batch["token_level_rewards"]} if need_critic(config) else {}
    tensors = {name: column for name, column in batch.items() if name != "index"}
    columns = batch | {"batch": tensors, "non_tensor_batch": {"uid": batch["index"]}}
    columns |= {"config": settings, "gamma": settings.gamma, "lam": settings.lam}
    taken = inspect.signature(function).parameters
    return function(**{name: columns[name] for name in taken if name in columns})[0]


def _advantage_failure(config: DictConfig, estimator: str) -> BaseException | None:
    """What an estimator raises on the batch."""
    return attempt(lambda: _advantages(config, estimator, _batch()))[1]


def estimator_problems(config: DictConfig) -> Iterator[str]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as REGISTRY

    estimator, is_broken = str(config.algorithm.adv_estimator), library_problem(config) is not None
    setting = f"algorithm.adv_estimator={estimator}"
    if estimator not in REGISTRY:
        if is_broken:  # it may be the one that registers it
            return
        wrong = "is not known"
    elif (failure := _advantage_failure(config, estimator)) is None:
        return
    elif not str(inspect.unwrap(REGISTRY[estimator]).__module__).startswith(_CERTAIN):
        _note(setting, failure)
        return
    else:
        wrong = f"needs columns that verl's V1 trainer, which this run uses, does not have ({in_words(failure)})"
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
    for key, value, compute, remedy in (
        ("rollout_rs", rules, compute_rollout_rejection_mask, _RS_THRESHOLD),
        ("rollout_is", weights, compute_rollout_correction_weights, _IS_THRESHOLD),
    ):
        threshold = correction.get(f"{key}_threshold")
        call = functools.partial(compute, 0 * mask_BT, mask_BT, value, threshold)
        if value is not None and (failure := attempt(call)[1]):
            yield (
                f"algorithm.rollout_correction.{key}={value} with {key}_threshold="
                f"{'null' if threshold is None else threshold}: {failure} ({key}_threshold is {remedy})"
            )


def _penalty_problems(config: DictConfig) -> Iterator[str]:
    import torch
    from verl.trainer.ppo.core_algos import kl_penalty

    def is_estimated(name: str) -> bool:
        return attempt(lambda: kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name))[1] is None

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    for key, penalised, estimate in (
        (f"{_ACTOR}.kl_loss_type", actor.use_kl_loss, str(actor.kl_loss_type)),
        ("algorithm.kl_penalty", algorithm.use_kl_in_reward, str(algorithm.kl_penalty)),
    ):
        if penalised and not is_estimated(estimate):
            known = [name for name in _KL_ESTIMATES if is_estimated(name)]
            yield f"{key}={estimate} is nothing that verl computes: choose one of {', '.join(known)}"


# ---------------------------------------------------------------- the loss


def loss_problems(config: DictConfig) -> Iterator[str]:
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
    if has_class and attempt(lambda: importlib.import_module(has_class.rpartition(".")[0]))[1]:
        return  # the job's rules say so; it may be the one that registers the loss
    with contextlib.suppress(*_REFUSALS):
        settings = omega_conf_to_dataclass(actor)
    if loss_mode not in POLICY_LOSS_REGISTRY:
        known = sorted(POLICY_LOSS_REGISTRY)
        yield (
            f"{_LOSS}={loss_mode} is registered by nobody: name the module that "
            f"registers it in actor_rollout_ref.model.external_lib or _target_, or choose one of {', '.join(known)}"
        )
    elif has_class and settings is not None:
        function = POLICY_LOSS_REGISTRY[loss_mode]
        arguments = _loss_arguments(settings)
        _, failure = attempt(lambda: _update(function, arguments))
        if failure is not None and not getattr(failure, "needs_worker", False):  # an exception may say so itself
            setting = f"{_LOSS}={loss_mode}"
            if _is_certain(function, arguments, failure):
                yield f"{setting} would end the run at its first mini-batch: {in_words(failure)}"
            else:
                _note(setting, failure)


def _loss_arguments(settings: Any, scale: float = 0.001, weighted: bool = False) -> dict[str, Any]:
    """What verl hands to a loss, of eight responses. The last three have A = 0, and are the longest.

    ``scale`` is that of log pi - log pi_old and of A, whose mean is not 0; ``weighted``: with weights of a rollout
    correction.
    """
    import torch

    draw = torch.Generator().manual_seed(int(scale * 1000))
    length_B = torch.tensor([5, 2, 4, 1, 3, 7, 9, 8])
    mask_BT = (torch.arange(9) < length_B[:, None]).float()
    settings.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(mask_BT.sum()),
        global_batch_size=len(mask_BT),
        loss_scale_factor=settings.loss_scale_factor,
    )
    old_BT = -5 * torch.rand(8, 9, generator=draw) * mask_BT
    return {
        "old_log_prob": old_BT,
        "log_prob": ((old_BT + scale * torch.randn(8, 9, generator=draw)) * mask_BT).requires_grad_(),
        "advantages": scale * torch.tensor([3.0, -1.0, 2.0, -0.5, 1.0, 0.0, 0.0, 0.0])[:, None] * mask_BT,
        "response_mask": mask_BT,
        "loss_agg_mode": settings.loss_agg_mode,
        "config": settings,
        "rollout_is_weights": (0.5 + torch.rand(8, 1, generator=draw)) * mask_BT if weighted else None,
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
            raise ResultError(
                f"{in_words(error)}. A loss returns two things: its value, a tensor of one number with a gradient, and "
                "its metrics, a dictionary of numbers"
            ) from error
    if not torch.isfinite(arguments["log_prob"].grad).all():
        raise ValueError("its gradient is not finite")


# ---------------------------------------------------------------- the optimizer


def _optimizer_problems(config: DictConfig) -> Iterator[str]:
    """An optimizer that is in no module, or that refuses its settings, which verl makes in the workers."""
    import torch
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config.optimizer import build_optimizer

    try:
        settings = omega_conf_to_dataclass(config.actor_rollout_ref.actor.optim)
    except _REFUSALS:  # which verl's own checks say
        return
    named = f"{_ACTOR}.optim.optimizer_impl={settings.optimizer_impl} with optimizer={settings.optimizer}"
    module, failure = attempt(lambda: importlib.import_module(settings.optimizer_impl))
    if isinstance(failure, ImportError):
        yield MachineProblem(f"{named}: {failure}; install its package on every node, or leave both out")
    elif failure is not None:
        _note(named, failure)
    elif not hasattr(module, settings.optimizer):
        yield f"{named}: the module has no such class; AdamW is verl's"
    else:
        # Of a weight with two dimensions: some optimizers take no other.
        _, failure = attempt(lambda: build_optimizer([torch.nn.Parameter(torch.zeros(2, 2))], settings))
        if isinstance(failure, TypeError | ValueError | RuntimeError) and settings.optimizer_impl.startswith("torch."):
            yield f"{named}: {' '.join(str(failure).split())}; correct the settings of {_ACTOR}.optim"
        elif failure is not None:
            _note(named, failure)


# ---------------------------------------------------------------- responses with A = 0


def why_zero_advantages_count(config: DictConfig, loss_is_known: bool = False) -> str | None:
    """Why responses to a prompt whose rewards are all equal take part in an update: the setting, and what it does.

    None if leaving them out changes no gradient: A is 0 there by rewards alone, the loss has no gradient where A = 0,
    and nothing else of the update reads them. A user's estimator and loss are tried.

    Args:
        config: Composed, without other problems.
        loss_is_known: Whether the loss is one whose responses with A = 0 have no part in it.
    """
    from verl.trainer.ppo.utils import need_critic

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.get("rollout_correction") or {}
    has_critic, failure = attempt(lambda: need_critic(config))  # it warns of every estimator but GAE
    if failure is not None:
        raise failure
    for setting, counts, why in (
        (f"{_ACTOR}.use_kl_loss=true", actor.use_kl_loss, "penalises every response"),
        ("algorithm.use_kl_in_reward=true", algorithm.use_kl_in_reward, "makes rewards differ that are equal"),
        (f"{_ACTOR}.entropy_coeff={actor.entropy_coeff}", actor.entropy_coeff != 0, "acts on every response"),
        (
            f"critic.enable={as_written(config.critic.enable)} with algorithm.adv_estimator={algorithm.adv_estimator}",
            has_critic,
            "trains a critic with every response",
        ),
        (
            "algorithm.rollout_correction.rollout_is_batch_normalize=true",
            correction.get("rollout_is") is not None and correction.get("rollout_is_batch_normalize"),
            "divides by a mean over all responses",
        ),
        ("distillation.enabled=true", OmegaConf.select(config, "distillation.enabled"), "acts on every response"),
        (f"{_MTP}=true", OmegaConf.select(config, _MTP), "trains with every response"),
        (
            f"{_ACTOR}.strategy={actor.strategy}",
            not str(actor.strategy).startswith("fsdp"),
            "is not FSDP",
        ),
    ):
        if counts:
            return f"{setting} {why}"
    if why := _on_trial(lambda: _estimator_reads_more(config)):
        return f"algorithm.adv_estimator={algorithm.adv_estimator} {why}"
    if not loss_is_known and (why := _on_trial(lambda: _loss_reads_more(config))):
        return f"{_LOSS}={actor.policy_loss.loss_mode} {why}"
    return None


def _on_trial(find: Callable[[], str | None]) -> str | None:
    """What a function finds out about code that is tried; else how that code has failed; None if nothing."""
    why, failure = attempt(find)
    return _failed_here(failure) if failure else why


def _estimator_reads_more(config: DictConfig) -> str | None:
    """What an estimator does with responses whose rewards are equal, or with log-probabilities; None if nothing."""
    import torch

    def of(batch: dict[str, Any]) -> Any:
        return (_advantages(config, str(config.algorithm.adv_estimator), batch) * batch["response_mask"]).detach()

    def differ(advantages_BT: Any, others_BT: Any) -> bool:
        return not torch.allclose(advantages_BT[:4, :4], others_BT[:4, :4], rtol=1e-5, atol=1e-6)

    advantages_BT = of(_batch())
    # As TransferQueue would have them: a token each, with mask 0, whose reward is that of the response.
    reduced = _batch()
    reduced["token_level_rewards"][4:] = 0
    reduced["token_level_rewards"][4:, 0] = torch.tensor([1.0, 1.0, 0.5, 0.5])
    reduced["response_mask"][4:] = 0
    reduced = {name: column if name == "index" else column[:, :4] for name, column in reduced.items()}
    others = _batch()
    others["old_log_probs"] = others["old_log_probs"] * torch.linspace(0.1, 3, 7)
    if not advantages_BT[4:].abs().max() <= 1e-4:
        return "is not 0 where all responses to a prompt earn the same reward"
    if differ(advantages_BT, of(reduced)):
        return "depends on the lengths of responses to other prompts"
    return "reads log-probabilities" if differ(advantages_BT, of(others)) else None


def _loss_reads_more(config: DictConfig) -> str | None:
    """What a loss does with responses of A = 0: a gradient, or a part in that of others; None if nothing."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass

    actor = config.actor_rollout_ref.actor
    function = POLICY_LOSS_REGISTRY.get(actor.policy_loss.get("loss_mode"))
    if function is None:
        return "is registered by nobody"
    weighted = (config.algorithm.get("rollout_correction") or {}).get("rollout_is") is not None
    settings = omega_conf_to_dataclass(actor)
    tried = (_differs_without(function, _loss_arguments(settings, scale, weighted)) for scale in (0.001, 0.1, 1.0, 3.0))
    return next(filter(None, tried), None)


def _differs_without(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """Compare the gradient of eight responses with that of the first five, those with A != 0; what differs, or None."""
    import torch

    def gradient(rows: slice, width: int, mask_BT: Any = arguments["response_mask"]) -> Any:
        given = {
            name: value[rows, :width] if torch.is_tensor(value) else value
            for name, value in {**arguments, "response_mask": mask_BT}.items()
        }
        given["log_prob"] = given["log_prob"].detach().clone().requires_grad_()
        _update(function, given)
        return given["log_prob"].grad

    def differ(gradient_BT: Any) -> bool:
        return not torch.allclose(gradient_BT[:5, :5], whole_BT[:5, :5], rtol=1e-4, atol=1e-7 * float(largest))

    whole_BT = gradient(slice(None), 9)
    largest = whole_BT.abs().max()
    if whole_BT[5:].any():
        return "has a gradient where A = 0"
    emptied_BT = arguments["response_mask"] * (torch.arange(8) < 5)[:, None]
    if differ(gradient(slice(0, 5), 5)) or differ(gradient(slice(None), 5, emptied_BT)):
        return "gives others another gradient without the responses of A = 0"
    return "has a gradient where all is padding" if gradient(slice(5, 8), 1, emptied_BT).any() else None
