"""A loss of the user's (docs/extending.md): what must be known of it before Ray starts.

``actor.policy_loss._target_`` names a dataclass of its settings, so that they can be given on the command line, are
checked, and stand in ``config.yaml`` and ``run.json``. The class says by fields what the rest of the recipe may do with
the loss: ``grad_scale``, how its gradient grows with L ("1": a sum over tokens, which ``match_scale=matched`` divides
by a typical length; "1/L": a mean); ``band``, in words, for the report.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any, Final

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from fspo.losses import ALGORITHMS
from fspo.names import did_you_mean
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

_POLICY_LOSS: Final = "actor_rollout_ref.actor.policy_loss"
_LIBRARY: Final = "actor_rollout_ref.model.external_lib"
_INSTALL: Final = "install its package on every node, or start the command in the folder that holds it"


def is_own(policy_loss: DictConfig) -> bool:
    """Whether the loss is neither of :data:`fspo.losses.ALGORITHMS` nor one that verl itself registers."""
    loss = POLICY_LOSS_REGISTRY.get(policy_loss.loss_mode)
    is_verls = loss is not None and loss.__module__.startswith("verl.")
    return policy_loss.loss_mode not in ALGORITHMS and not is_verls


def settings_of(policy_loss: DictConfig) -> dict[str, Any]:
    """Every setting that the class of an own loss (``_target_``) adds to verl's, with its value.

    Raises:
        InstantiationException: if the class cannot be imported, or refuses a setting.
    """
    settings = instantiate(policy_loss, _convert_="partial")
    if not isinstance(settings, PolicyLossConfig):  # without _target_ there is no class
        return {}
    verls = {field.name for field in dataclasses.fields(PolicyLossConfig)} - {"loss_mode"}
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: value for name, value in values.items() if name not in verls}


def unknown_scale(config: DictConfig) -> str | None:
    """What ``match_scale=matched`` cannot do with an own loss that does not say how its gradient grows with L."""
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    if config.fspo.match_scale == "native" or not is_own(policy_loss):
        return None
    if settings_of(policy_loss).get("grad_scale") in ("1", "1/L"):
        return None
    return (
        f"match_scale=matched leaves the gradient of loss_mode={policy_loss.loss_mode} as it is, because nothing says "
        "how it grows with the response's length: give match_scale=native, or let the class of its settings (_target_) "
        'have the field grad_scale ("1" for a sum over tokens, "1/L" for a mean)'
    )


def problems(config: DictConfig) -> Iterator[str]:
    """What is wrong with an own loss: where it comes from, its settings."""
    policy_loss, library = config.actor_rollout_ref.actor.policy_loss, config.actor_rollout_ref.model.external_lib
    try:
        for module in library if OmegaConf.is_list(library) else [library] if library else []:
            importlib.import_module(str(module))
    except Exception as error:
        yield f"{_LIBRARY}={library} cannot be imported ({type(error).__name__}: {error}): {_INSTALL}"
        return
    if policy_loss.loss_mode in ALGORITHMS:
        return
    try:
        settings_of(policy_loss)  # imports the class's module, which registers the loss
    except InstantiationException as error:
        cause = " ".join(str(error.__cause__ or error).split())
        yield f"{_POLICY_LOSS}._target_={policy_loss._target_}: {cause} (if the module is missing, {_INSTALL})"
        return
    if policy_loss.loss_mode not in POLICY_LOSS_REGISTRY:
        yield (
            f"{_POLICY_LOSS}.loss_mode={policy_loss.loss_mode} is registered by nobody"
            f"{did_you_mean(policy_loss.loss_mode, POLICY_LOSS_REGISTRY)}: name the module that registers it in "
            f"{_LIBRARY} or _target_, or choose one of {', '.join(sorted(POLICY_LOSS_REGISTRY))}"
        )
