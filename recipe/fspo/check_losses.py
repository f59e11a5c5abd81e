"""The losses of verl's registry, ours included, for ``python -m fspo.check_loss recipe.fspo.check_losses:NAME ...``.

A loss is called with verl's own configuration of the actor and the settings of ``conf/algo``. NAME, an attribute of
this module, is a value of ``algo``, or a loss of the registry that no file of ``conf/algo`` names.
"""

from __future__ import annotations

from typing import Any, Final

import recipe.fspo.policy_loss  # noqa: F401  (registers ours)
from hydra.utils import instantiate
from omegaconf import OmegaConf
from recipe.fspo import CONF_DIR
from recipe.fspo.job import choices
from recipe.fspo.recorder import RECORDER

from fspo.check_loss.call import LossError, PolicyLoss
from fspo.losses import ALGORITHMS
from fspo.names import did_you_mean
from fspo.types import BandState
from fspo.verl import SequencePolicyLossConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

#: What a loss needs that verl has no default for.
_NEEDED: Final[dict[str, dict[str, Any]]] = {"dro": {"dro_beta": 0.1}, "bypass_mode": {"rollout_correction": {}}}


def actors() -> dict[str, dict[str, Any]]:
    """Settings of the actor: those of each file in conf/algo, then of the losses that none of them names."""
    base = OmegaConf.load(CONF_DIR / "base.yaml").actor_rollout_ref.actor.loss_agg_mode
    settings: dict[str, dict[str, Any]] = {}
    for algo in choices("algo"):
        actor = OmegaConf.load(CONF_DIR / "algo" / f"{algo}.yaml").actor_rollout_ref.actor
        settings[algo] = {"loss_agg_mode": base} | OmegaConf.to_container(actor)
    named = {actor["policy_loss"]["loss_mode"] for actor in settings.values()}
    for name in POLICY_LOSS_REGISTRY:
        if name not in named:
            settings[name] = {"loss_agg_mode": base, "policy_loss": {"loss_mode": name} | _NEEDED.get(name, {})}
    return settings


def policy_loss(actor: dict[str, Any]) -> PolicyLoss:
    """The registered loss that an actor's settings name, with verl's configuration."""
    RECORDER.begin_update(BandState(), step=0)  # as a trainer that measures bands has it before any data
    settings = dict(actor)
    loss = dict(settings.pop("policy_loss"))
    if "_target_" in loss:
        config = instantiate(loss)
    else:
        config = (SequencePolicyLossConfig if loss["loss_mode"] in ALGORITHMS else PolicyLossConfig)(**loss)
    verls = FSDPActorConfig(
        strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=config, **settings
    )
    return PolicyLoss(POLICY_LOSS_REGISTRY[loss["loss_mode"]], verls, settings["loss_agg_mode"])


def registered(name: str) -> PolicyLoss:
    """The loss that ``--like NAME`` names: of the registry, or else the value of ``algo``; LossError if it is neither.

    A loss of the registry has the settings of the only file of ``conf/algo`` that names it, or else verl's defaults.
    """
    known = actors()
    files = [actor for actor in known.values() if actor["policy_loss"]["loss_mode"] == name]
    if len(files) == 1:
        return policy_loss(files[0])
    if name in POLICY_LOSS_REGISTRY:
        return policy_loss({"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": name}})
    if name in known:
        return policy_loss(known[name])
    names = {**dict.fromkeys(POLICY_LOSS_REGISTRY), **known}
    close = did_you_mean(name, names)
    raise LossError(f"--like {name} is no loss of verl's registry and no value of algo{close}: {', '.join(names)}")


def __dir__() -> list[str]:
    return list(actors())


def __getattr__(name: str) -> PolicyLoss:
    known = actors()
    if name not in known:
        raise AttributeError(f"{name} is neither a value of algo nor a loss of verl's registry")
    return policy_loss(known[name])
