"""A loss of the user's (docs/extending.md): what must be known of it before Ray starts.

``actor.policy_loss._target_`` names a dataclass of its settings, so that they can be given on the command line, are
checked, and stand in ``config.yaml`` and ``run.json``. The class says by fields what the rest of the recipe may do with
the loss: ``grad_scale`` and ``grad_multiplier``, how its gradient grows with L and the factor that it applies
(``match_scale=matched`` sets it); ``band``, in words, for the report.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

from fspo.losses import ALGORITHMS

_POLICY_LOSS: Final = "actor_rollout_ref.actor.policy_loss"
_LIBRARY: Final = "actor_rollout_ref.model.external_lib"
_INSTALL: Final = "install its package on every node, or start the command in the folder that holds it"


def is_verls(name: str) -> bool:
    """Whether a loss of this name is one that verl itself registers."""
    loss = POLICY_LOSS_REGISTRY.get(name)
    return loss is not None and loss.__module__.startswith("verl.")


def is_own(policy_loss: DictConfig) -> bool:
    """Whether the loss is neither of :data:`fspo.losses.ALGORITHMS` nor verl's."""
    return policy_loss.loss_mode not in ALGORITHMS and not is_verls(policy_loss.loss_mode)


def _class(policy_loss: DictConfig) -> type[PolicyLossConfig] | None:
    """The dataclass that ``_target_`` names; None for verl's own, which has no settings of such a loss."""
    name = policy_loss.get("_target_")
    found = None if name is None else get_class(name)
    return None if found is PolicyLossConfig else found


def settings_of(policy_loss: DictConfig) -> dict[str, Any]:
    """Every setting that the class of an own loss adds to verl's, with its value."""
    cls = _class(policy_loss)
    if cls is None:
        return {}
    given = instantiate(policy_loss, _convert_="partial")
    verls = {field.name for field in dataclasses.fields(PolicyLossConfig)} - {"loss_mode"}
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(cls) if field.name not in verls}


def problems(config: DictConfig) -> Iterator[str]:
    """What is wrong with an own loss: where it comes from, its class of settings, its settings, a matched gradient."""
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    for module in _modules(config):
        try:
            importlib.import_module(module)
        except Exception as error:
            yield f"{_LIBRARY}={module} cannot be imported ({type(error).__name__}: {error}): {_INSTALL}"
            return
    try:
        cls = _class(policy_loss)
    except Exception as error:
        yield f"{_POLICY_LOSS}._target_={policy_loss._target_} cannot be imported ({error}): {_INSTALL}"
        return
    if policy_loss.loss_mode not in POLICY_LOSS_REGISTRY:
        yield (
            f"{_POLICY_LOSS}.loss_mode={policy_loss.loss_mode} is registered by nobody"
            f"{_did_you_mean(policy_loss.loss_mode, POLICY_LOSS_REGISTRY)}: name the module that registers it in "
            f"{_LIBRARY} or _target_, or choose one of {', '.join(sorted(POLICY_LOSS_REGISTRY))}"
        )
        return
    if not is_own(policy_loss):
        return
    problem = _problem_of_settings(policy_loss, cls)
    yield from [problem] if problem else _scale_problems(config)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    like = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {like[0]}?)" if like else ""


def _modules(config: DictConfig) -> list[str]:
    given = config.actor_rollout_ref.model.external_lib
    return [str(each) for each in given] if OmegaConf.is_list(given) else [given] if given else []


def _problem_of_settings(policy_loss: DictConfig, cls: type | None) -> str | None:
    if cls is None:
        return None
    name = f"{_POLICY_LOSS}._target_={policy_loss._target_}"
    if not (isinstance(cls, type) and issubclass(cls, PolicyLossConfig) and dataclasses.is_dataclass(cls)):
        return f"{name} must be a dataclass that extends verl.workers.config.PolicyLossConfig"
    fields = [field.name for field in dataclasses.fields(cls)]
    for key in policy_loss:
        if key not in fields:
            return f"{name} has no field {key}{_did_you_mean(key, fields)}; it has {', '.join(fields)}"
    try:
        instantiate(policy_loss, _convert_="partial")
    except InstantiationException as error:
        return f"{name}: {error.__cause__ or error}"
    return None


def _scale_problems(config: DictConfig) -> Iterator[str]:
    if config.fspo.match_scale != "matched":
        return
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    settings = settings_of(policy_loss)
    if not {"grad_scale", "grad_multiplier"} <= set(settings) or settings["grad_scale"] not in ("1", "1/L"):
        yield (
            f"match_scale=matched does not know how the gradient of loss_mode={policy_loss.loss_mode} grows with the "
            "response's length, so a comparison would be one of learning rates: give match_scale=native, or let the "
            'class of its settings (_target_) have the fields grad_scale ("1" for a sum over tokens, "1/L" for a mean) '
            "and grad_multiplier, which the loss multiplies by"
        )
