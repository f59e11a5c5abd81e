"""What must be known of a loss before Ray starts, if it is not one of :data:`fspo.losses.ALGORITHMS`.

A loss of verl's, or of the user's (docs/extending.md).
``actor.policy_loss._target_`` names a dataclass of its settings, so that they can be given on the command line, are
checked, and stand in ``config.yaml`` and ``run.json``. The class says by fields what the rest of the recipe may do with
the loss: ``grad_scale``, how its gradient grows with L ("1": a sum over tokens, which ``fspo.match_scale=matched``
divides by a typical length; "1/L": a mean); ``band``, in words, for the report.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Final

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from recipe.fspo import CONF_DIR
from recipe.runner.launch.checks import library_problem

from fspo.losses import ALGORITHMS
from fspo.names import did_you_mean
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

_POLICY_LOSS: Final = "actor_rollout_ref.actor.policy_loss"
#: The class of settings of this recipe's losses.
_OUR_CLASS: Final = "recipe.fspo.config.SequencePolicyLossConfig"
#: What a loss of verl's needs beside its name.
_NEEDED: Final = {
    "dro": f" {_POLICY_LOSS}.dro_beta=0.1",
    "bypass_mode": " algorithm.rollout_correction.bypass_mode=true",
}


def is_users_loss(policy_loss: DictConfig) -> bool:
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
    """What ``fspo.match_scale=matched`` cannot do with an own loss that does not say how its gradient grows with L."""
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    if config.fspo.match_scale == "native" or not is_users_loss(policy_loss):
        return None
    if settings_of(policy_loss).get("grad_scale") in ("1", "1/L"):
        return None
    return (
        f"fspo.match_scale=matched leaves the gradient of loss_mode={policy_loss.loss_mode} as it is, because nothing "
        "says how it grows with the response's length: give fspo.match_scale=native, or let the class of its settings "
        '(_target_) have the field grad_scale ("1" for a sum over tokens, "1/L" for a mean)'
    )


def overrides_of(loss_mode: str) -> str:
    """The overrides with which a registered loss can be used; more than one of ``algo=`` with "or" between them."""
    files = sorted((CONF_DIR / "algo").glob("*.yaml"))
    losses = {file.stem: OmegaConf.load(file).actor_rollout_ref.actor.policy_loss.loss_mode for file in files}
    algos = [f"algo={algo}" for algo, loss in losses.items() if loss == loss_mode]
    return " or ".join(algos) or f"algo=grpo {_POLICY_LOSS}.loss_mode={loss_mode}{_NEEDED.get(loss_mode, '')}"


def lacks_its_class(policy_loss: DictConfig) -> bool:
    """Whether ``_target_`` is missing, or the class of other losses."""
    target = policy_loss.get("_target_")
    return not target or (target == _OUR_CLASS and policy_loss.loss_mode not in ALGORITHMS)


def problems(config: DictConfig) -> Iterator[str]:
    """What is wrong with such a loss: where it comes from, its settings."""
    actor = config.actor_rollout_ref.actor
    loss_mode, target = actor.policy_loss.loss_mode, actor.policy_loss.get("_target_")
    if problem := library_problem(config):
        yield problem
        return
    if target and loss_mode in ALGORITHMS:
        return
    lacks_class = lacks_its_class(actor.policy_loss)
    if not lacks_class:
        try:
            settings_of(actor.policy_loss)  # imports the class's module, which registers the loss
        except InstantiationException as error:
            yield f"{_POLICY_LOSS}._target_={target}: {_reason(error, actor)}"
            return
    named, known = f"{_POLICY_LOSS}.loss_mode={loss_mode}", {*POLICY_LOSS_REGISTRY, *ALGORITHMS}
    if loss_mode not in known:
        yield (
            f"{named} is registered by nobody{did_you_mean(loss_mode, known)}: name the module that registers it in "
            f"actor_rollout_ref.model.external_lib or _target_, or choose one of {', '.join(sorted(known))}"
        )
    elif lacks_class:
        if target:
            yield f"{named} has other settings than those of _target_={target}: give {overrides_of(loss_mode)}"
        else:
            way = f"leave ~{_POLICY_LOSS}._target_ out, and give {overrides_of(loss_mode)}"
            yield f"{named} without _target_ has no settings: {way}"


def _reason(error: InstantiationException, actor: DictConfig) -> str:
    """Why a class of settings could not be made, and the remedy where that is not in the reason."""
    cause = error.__cause__ or error
    text = " ".join(str(cause).split())
    if isinstance(cause, ImportError):
        return f"{text}: install its package on every node, or start the command in the folder that holds it"
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if unknown and unknown[1] in actor:
        return f"{text}: the key is actor_rollout_ref.actor.{unknown[1]}"
    return text
