"""The rows of the table of given keys that nothing reads which are the method's, or concern this recipe's reward."""

from __future__ import annotations

from typing import Final

from omegaconf import DictConfig, OmegaConf
from recipe.fspo.config import is_by_sequence
from recipe.fspo.old_keys import OVERLONG
from recipe.runner.launch.job import Row

_ACTOR: Final = "actor_rollout_ref.actor"
_POLICY_LOSS: Final = f"{_ACTOR}.policy_loss"
_BUFFER: Final = "reward.reward_kwargs.overlong_buffer_cfg"
_REWARD: Final = "reward.custom_reward_function"


def _has_own_manager(config: DictConfig) -> bool:
    manager = config.reward.reward_manager
    return manager.source == "importlib" and str(manager.module.path) == "pkg://recipe.runner.reward_manager"


def _has_no_buffer(config: DictConfig) -> bool:
    return _has_own_manager(config) and not OmegaConf.select(config, f"{_BUFFER}.enable")


def _has_own_reward(config: DictConfig) -> bool:
    return str(config.reward.custom_reward_function.path) == "pkg://recipe.math.reward"


def _has_no_reference(config: DictConfig) -> bool:
    penalised = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return not (config.fspo.kl_to_start or penalised)


ROWS: Final[tuple[Row, ...]] = (
    Row(
        (f"{_ACTOR}.clip_ratio", f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"),
        f"{_POLICY_LOSS}.loss_mode",
        "a sequence-level loss",
        is_by_sequence,
        f"leave it out, because the band has {_POLICY_LOSS}.c_low and c_high, in nats, which a run "
        "measures (docs/algorithms.md); or give algo=grpo, dapo or gspo_verl, which read it",
        "always refused",
    ),
    Row(
        (f"{_ACTOR}.clip_ratio_c", f"{_ACTOR}.tau_*", f"{_POLICY_LOSS}.*_cov*", f"{_POLICY_LOSS}.ppo_kl_coef"),
        f"{_POLICY_LOSS}.loss_mode",
        "a sequence-level loss",
        is_by_sequence,
        f"its settings are {_POLICY_LOSS}.* (docs/algorithms.md)",
    ),
    Row(
        (f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor"),
        f"{_POLICY_LOSS}.loss_mode",
        "a sequence-level loss, without KL loss and entropy term",
        lambda config: (
            is_by_sequence(config)
            and not config.actor_rollout_ref.actor.use_kl_loss
            and not config.actor_rollout_ref.actor.entropy_coeff
        ),
        f"the loss is a mean over responses; {_POLICY_LOSS}.grad_scale says how it grows with their length",
    ),
    Row(
        ("reward.reward_kwargs.max_resp_len", f"{_BUFFER}.*"),
        f"{_BUFFER}.enable",
        "not true",
        _has_no_buffer,
        "there is no overlong penalty",
    ),
    Row(
        ("reward.reward_kwargs.*",),
        "reward.reward_manager.module.path",
        "this recipe's",
        _has_own_manager,
        OVERLONG,
        "always refused",
    ),
    Row(
        ("reward.sandbox_fusion.*",),
        f"{_REWARD}.path",
        "this recipe's",
        _has_own_reward,
        "it runs no code of responses",
    ),
    Row(
        ("actor_rollout_ref.ref.*",),
        "fspo.kl_to_start",
        "false, and no KL penalty",
        _has_no_reference,
        "there is no reference model",
    ),
    Row(
        ("reward.reward_model.enable",),
        f"{_REWARD}.path",
        "this recipe's",
        _has_own_reward,
        f"the reward model would be started and never asked; give {_REWARD}.path=null, or a function that asks it",
        "always refused",
    ),
)
