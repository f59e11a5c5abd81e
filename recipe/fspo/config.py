"""Settings of the method, ``fspo.*`` and those of the sequence-level losses, and what follows from others.

Nothing here imports the runner; :mod:`recipe.fspo.rules` has the checks before a start.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from recipe.fspo import CONF_DIR

from fspo.losses import ALGORITHMS
from fspo.types import NO_CLIP, SequenceLossSettings
from fspo.verl import SequencePolicyLossConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

_ACTOR: Final = "actor_rollout_ref.actor"
_POLICY_LOSS: Final = f"{_ACTOR}.policy_loss"

#: Advantage estimators that compare the responses to one prompt, and need at least two.
GROUP_ESTIMATORS: Final = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "grpo_passk")


# ---------------------------------------------------------------- losses that are none of fspo.losses.ALGORITHMS


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


def policy_loss_settings(policy_loss: DictConfig) -> SequenceLossSettings | None:
    """The loss library's settings for a composed ``actor.policy_loss``; None if it names a loss of another family.

    Raises:
        ValueError: for a value out of range, a contradiction or an unknown key.
    """
    values = OmegaConf.to_container(policy_loss, resolve=True)
    if values["loss_mode"] not in ALGORITHMS:
        return None
    values.pop("_target_", None)
    try:
        return SequencePolicyLossConfig(**values).settings()
    except TypeError as error:
        raise ValueError(f"{_POLICY_LOSS}: {error} (docs/algorithms.md has the settings)") from None


def complete(config: DictConfig) -> dict[str, object]:
    """Fill in the settings of mode and loss that follow from others, in place; their entries of ``run.json``."""
    complete_mode(config)
    complete_loss(config)
    loss = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss, resolve=True)
    return {
        "algo": config.fspo.algo,
        "clip_values": config.fspo.clip_values,
        "loss": {key: value for key, value in loss.items() if value is not None},
    }


def complete_settings(config: DictConfig) -> None:
    """Give ``fspo.*`` every setting that the configuration does not have, as verl's own has none; in place.

    They are those of ``conf/base.yaml``, but for ``kl_to_start``: a reference policy takes memory, and a plain command
    asks for none. Of a run's configuration all are there.
    """
    defaults = OmegaConf.load(CONF_DIR / "base.yaml").fspo
    with open_dict(config):
        config.fspo = OmegaConf.merge(defaults, {"kl_to_start": False}, config.get("fspo") or {})
    if config.fspo.clip_values is None:
        config.fspo.clip_values = "published" if keeps_clip_values(config) else "measured"
    if own_scale(config):
        config.fspo.match_scale = "native"


def complete_loss(config: DictConfig) -> None:
    """Write every setting of the loss into ``actor.policy_loss``, so that ``config.yaml`` says what was run; in place.

    A loss of the user's has the fields of its own class.
    """
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    settings = policy_loss_settings(policy_loss)
    if note := own_scale(config):
        print(f"note: {note}", flush=True)
        config.fspo.match_scale = "native"
    why = keeps_clip_values(config)
    could = can_be_measured(policy_loss) and (policy_loss.get("c_low") or 0) < NO_CLIP
    if why and could and config.fspo.get("clip_values") != "published":
        print(f"note: clip values are not measured: {why}", flush=True)
    with open_dict(config.fspo):
        config.fspo.clip_values = "published" if why else "measured"
    if settings is not None:  # algo=grpo with loss_mode=fspo has verl's _target_, which knows none of these fields
        values = dataclasses.asdict(settings) | {"_target_": "fspo.verl.SequencePolicyLossConfig"}
    elif is_users_loss(policy_loss):
        values = settings_of(policy_loss)
    else:
        return
    with open_dict(policy_loss):
        policy_loss.update(values)


def keeps_clip_values(config: DictConfig) -> str | None:
    """Why a run keeps the clip values that it begins with; None if it measures them. Of a loss not yet completed."""
    loss = config.actor_rollout_ref.actor.policy_loss
    if OmegaConf.select(config, "fspo.clip_values") == "published":
        return "fspo.clip_values=published"
    if not can_be_measured(loss):
        return f"loss_mode={loss.loss_mode} has none that could be"
    if values := clip_values_of(config):
        return f"{_POLICY_LOSS} has {' and '.join(values)}"
    if config.get("evaluate"):
        return "evaluate=true trains nothing"
    return None


def can_be_measured(loss: DictConfig) -> bool:
    try:
        settings = policy_loss_settings(loss)
    except ValueError:  # which is said elsewhere
        return False
    return settings is not None


def clip_values_of(config: DictConfig) -> list[str]:
    """The clip values that a loss has from the command line or from its algorithm's file.

    A run that measures them names those of the loss's authors beside all its other settings. These were not given.
    """
    loss = config.actor_rollout_ref.actor.policy_loss
    values = {key: loss[key] for key in ("c_low", "c_high") if loss.get(key) is not None}
    settings = policy_loss_settings(loss)
    if OmegaConf.select(config, "fspo.clip_values") == "measured" and settings is not None:
        authors, completed = ALGORITHMS[loss.loss_mode], _is_completed(loss, settings)
        values = {k: v for k, v in values.items() if not (completed and v == getattr(authors, k))}
    return [f"{key}={value}" for key, value in values.items()]


def _is_completed(loss: DictConfig, settings: SequenceLossSettings) -> bool:
    return dataclasses.asdict(settings).items() <= dict(loss).items()


def own_scale(config: DictConfig) -> str | None:
    """A note on a given ``grad_multiplier``, to which ``fspo.match_scale=matched`` gives way; None without one.

    Both at once would divide the gradient twice. A run whose loss is divided names the factor 1 beside all its other
    settings. This one was not given.
    """
    loss = config.actor_rollout_ref.actor.policy_loss
    factor = loss.get("grad_multiplier")
    if factor is None or OmegaConf.select(config, "fspo.match_scale") == "native":
        return None
    try:
        settings = policy_loss_settings(loss)
    except ValueError:  # which is said elsewhere
        return None
    if settings is None or settings.grad_scale != "1":
        return None
    if _is_completed(loss, settings) and factor == ALGORITHMS[loss.loss_mode].grad_multiplier:
        return None
    return (
        f"{_POLICY_LOSS}.grad_multiplier={factor} is the factor on the gradient: fspo.match_scale is off (native), and "
        "divides by no length besides"
    )


def complete_mode(config: DictConfig) -> None:
    """Fill in how many mini-batches ``mode=separate_async`` trains between two transfers of the weights; in place."""
    separate_async = config.trainer.v1.separate_async
    if separate_async.parameter_sync_step is None:
        batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
        separate_async.parameter_sync_step = batch // mini


def is_by_sequence(config: DictConfig) -> bool:
    """Whether the loss is one of this repository's, with one advantage and one ratio for each response."""
    return config.actor_rollout_ref.actor.policy_loss.loss_mode in ALGORITHMS
