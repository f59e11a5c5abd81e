"""Settings of the method, ``fspo.*`` and those of the sequence-level losses, and what follows from others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Literal

from omegaconf import DictConfig, OmegaConf, open_dict
from recipe.fspo import CONF_DIR, TRAINER_MODES

from fspo.losses import ALGORITHMS
from fspo.types import SequenceLossSettings
from fspo.verl import SequencePolicyLossConfig

ACTOR: Final = "actor_rollout_ref.actor"
POLICY_LOSS: Final = f"{ACTOR}.policy_loss"
#: The class of settings of this recipe's losses.
OUR_CLASS: Final = "fspo.verl.SequencePolicyLossConfig"
#: Advantage estimators that compare the responses to one prompt, and need at least two.
GROUP_ESTIMATORS: Final = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "grpo_passk")


@dataclass(frozen=True)
class FspoSettings:
    """The settings ``fspo.*``; ``conf/base.yaml`` has their values and says what each does."""

    kl_to_start: bool
    match_scale: Literal["matched", "native"]
    clip_values: Literal["measured", "published"] | None
    accept: float
    skip_zero_advantage: bool | None


def is_ours(config: DictConfig) -> bool:
    """Whether the trainer is one of this recipe's."""
    return OmegaConf.select(config, "trainer.v1.trainer_mode") in TRAINER_MODES


def is_by_sequence(config: DictConfig) -> bool:
    """Whether the loss is one of this repository's, with one advantage and one ratio for each response."""
    return OmegaConf.select(config, f"{POLICY_LOSS}.loss_mode", throw_on_resolution_failure=False) in ALGORITHMS


def policy_loss_settings(policy_loss: DictConfig) -> SequenceLossSettings | None:
    """The loss library's settings for a composed ``actor.policy_loss``; None if it names a loss of another family.

    Raises ValueError for a value out of range, a contradiction or an unknown key.
    """
    values: Any = OmegaConf.to_container(policy_loss, resolve=True)
    if values["loss_mode"] not in ALGORITHMS:
        return None
    values.pop("_target_", None)  # algo=grpo with loss_mode=fspo has verl's
    try:
        return SequencePolicyLossConfig(**values).settings()
    except TypeError as error:
        raise ValueError(f"{POLICY_LOSS}: {error} (docs/algorithms.md has the settings)") from None


def complete(config: DictConfig) -> list[str]:
    """Fill in the settings of mode, method and loss that follow from others, in place; what there is to say of it.

    Once, before Ray, so that ``config.yaml`` says what was run. What the command gives (a clip value, a factor on the
    gradient) is decided here: afterwards a completed setting looks like a given one. ``fspo.*`` is that of
    ``conf/base.yaml`` where the configuration has none, as verl's own, but for ``kl_to_start``: a reference policy
    takes memory, and a plain command asks for none.
    """
    defaults = OmegaConf.load(CONF_DIR / "base.yaml").fspo
    with open_dict(config):
        config.fspo = OmegaConf.merge(defaults, {"kl_to_start": False}, config.get("fspo") or {})
    notes, loss = list[str](), config.actor_rollout_ref.actor.policy_loss
    settings = policy_loss_settings(loss)
    separate_async = config.trainer.v1.separate_async
    if separate_async.parameter_sync_step is None:  # transfers of the weights: one a rollout batch
        batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
        separate_async.parameter_sync_step = batch // mini
    if settings is None:
        kept = f"loss_mode={loss.loss_mode} has none that could be"
    elif given := [f"{key}={loss[key]:g}" for key in ("c_low", "c_high") if loss.get(key) is not None]:
        kept = f"{POLICY_LOSS} has {' and '.join(given)}"
    else:
        kept = "evaluate=true trains nothing" if config.get("evaluate") else ""
    if kept and config.fspo.clip_values != "published":
        if config.fspo.clip_values == "measured" or settings is not None:
            notes.append(f"clip values are not measured: {kept}")
        config.fspo.clip_values = "published"
    config.fspo.clip_values = config.fspo.clip_values or "measured"
    factor = loss.get("grad_multiplier")
    sums = settings is not None and settings.grad_scale == "1"
    if config.fspo.match_scale == "matched" and factor is not None and sums:
        notes.append(
            f"fspo.match_scale is native: {POLICY_LOSS}.grad_multiplier={factor} is the factor on the gradient"
        )
        config.fspo.match_scale = "native"
    if config.fspo.skip_zero_advantage is None:
        why = counts_zero_advantages(config)
        config.fspo.skip_zero_advantage = why is None
        if why:
            notes.append(f"responses without a gradient are not left out (fspo.skip_zero_advantage): {why}")
    if settings is not None:
        with open_dict(loss):
            loss.update(dataclasses.asdict(settings) | {"_target_": OUR_CLASS})
    return notes


def counts_zero_advantages(config: DictConfig) -> str | None:
    """Why responses to a prompt whose rewards are all equal take part in an update; None if they do not.

    They do not where A is 0 by rewards alone, as in verl's group estimators, the loss has no gradient where A = 0, as
    this recipe's, and nothing else of the update reads them.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.get("rollout_correction") or {}
    estimator = str(algorithm.adv_estimator)
    mtp = "actor_rollout_ref.model.mtp.enable"
    for counts, why in (
        (
            actor.policy_loss.loss_mode not in ALGORITHMS,
            f"{POLICY_LOSS}.loss_mode={actor.policy_loss.loss_mode} is none of this recipe's",
        ),
        (estimator not in GROUP_ESTIMATORS, f"algorithm.adv_estimator={estimator} compares no group of responses"),
        (actor.use_kl_loss, f"{ACTOR}.use_kl_loss=true penalises every response"),
        (algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward=true makes rewards differ that are equal"),
        (actor.entropy_coeff != 0, f"{ACTOR}.entropy_coeff={actor.entropy_coeff} acts on every response"),
        (config.critic.enable, "critic.enable=true trains a critic with every response"),  # null: with GAE only
        (
            correction.get("rollout_is") is not None and correction.get("rollout_is_batch_normalize"),
            "algorithm.rollout_correction.rollout_is_batch_normalize=true divides by a mean over all responses",
        ),
        (OmegaConf.select(config, "distillation.enabled"), "distillation.enabled=true acts on every response"),
        (OmegaConf.select(config, mtp), f"{mtp}=true trains with every response"),
        (not str(actor.strategy).startswith("fsdp"), f"{ACTOR}.strategy={actor.strategy} is not FSDP"),
    ):
        if counts:
            return why
    return None


def facts_of(config: DictConfig, algo: str | None = None) -> dict[str, Any]:
    """What ``run.json`` says of the method, by a completed configuration; ``algo`` is the name of the settings."""
    loss: Any = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss, resolve=True)
    return {
        "algo": algo or loss["loss_mode"],
        "clip_values": config.fspo.clip_values,
        "loss": {key: value for key, value in loss.items() if value is not None},
        "seed": config.data.seed,
        "experiment": config.trainer.experiment_name,
    }
