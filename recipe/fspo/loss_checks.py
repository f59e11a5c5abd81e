"""Checks across the settings that decide what a policy loss means: said before Ray starts, never silently ignored.

Each yields sentences naming the key, the value and what to set instead. Where a rule has a public reference, the
comment gives it (verl#N: issue or pull request N of verl).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig
from verl.workers.config import FSDPActorConfig

from fspo.types import SequenceLossSettings
from recipe.fspo.config import policy_loss_settings

Problems = Iterator[str]

_ACTOR = "actor_rollout_ref.actor"
_POLICY_LOSS = f"{_ACTOR}.policy_loss"

#: Keys of the actor that token-level losses read and the sequence-level ones do not.
_TOKEN_LEVEL_KEYS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
#: Advantage estimators that compare the responses to one prompt, and need at least two.
_GROUP_ESTIMATORS = frozenset({"grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "grpo_passk"})
#: A clip value per token (linear band) above this, or per sqrt(token) below it, belongs to the other algorithm:
#: GSPO's authors recommend 3e-4 / 4e-4 (verl#2775), FSPO's is about 0.03; frameworks have shipped 0.2 by mistake.
_LINEAR_MAX, _SQRT_MIN = 0.01, 0.003


def _default(key: str) -> Any:
    return FSDPActorConfig.__dataclass_fields__[key].default


def loss_problems(config: DictConfig) -> Problems:
    """Everything that contradicts itself or would be ignored, for the loss that ``config`` names."""
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    yield from _sampling_problems(config)
    yield from _group_problems(config)
    if policy_loss.loss_mode == "gspo":
        yield from _stock_gspo_problems(config)
    try:
        settings = policy_loss_settings(policy_loss)
    except (TypeError, ValueError) as error:
        yield str(error)
        return
    if settings is None:
        return
    length = config.fspo.reference_length
    if config.fspo.grad_scale == "matched" and (not isinstance(length, int | float) or length <= 0):
        yield f"fspo.reference_length={length!r}: grad_scale=matched needs a typical response length in tokens, above 0"
    yield from _ignored_problems(config, policy_loss.loss_mode)
    yield from _clip_problems(settings)
    yield from _micro_batch_problems(config)
    yield from _rollout_correction_problems(config)


def _sampling_problems(config: DictConfig) -> Problems:
    # Truncated sampling makes the sampled distribution another than the policy whose log-probs are taken (trl#6789).
    rollout = config.actor_rollout_ref.rollout
    for key, neutral in (("top_p", 1), ("top_k", -1)):
        if rollout[key] != neutral:
            yield (
                f"actor_rollout_ref.rollout.{key}={rollout[key]} cuts the sampling distribution, so importance ratios "
                f"are biased: set it to {neutral} (validation has its own val_kwargs.{key})"
            )
    if rollout.temperature <= 0:
        yield f"actor_rollout_ref.rollout.temperature={rollout.temperature} must be above 0 for training; 1.0 is usual"


def _group_problems(config: DictConfig) -> Problems:
    estimator, n = str(config.algorithm.adv_estimator), config.actor_rollout_ref.rollout.n
    if estimator in _GROUP_ESTIMATORS and n < 2:
        yield (
            f"algorithm.adv_estimator={estimator} compares the responses to one prompt, but "
            f"actor_rollout_ref.rollout.n={n}: set it to 2 or more"
        )


def _stock_gspo_problems(config: DictConfig) -> Problems:
    actor = config.actor_rollout_ref.actor
    if actor.clip_ratio_c != _default("clip_ratio_c"):
        yield f"{_ACTOR}.clip_ratio_c={actor.clip_ratio_c} is ignored by verl's gspo: leave it at its default"
    for key in ("clip_ratio_low", "clip_ratio_high"):
        if actor[key] is not None and actor[key] > _LINEAR_MAX:
            yield (
                f"{_ACTOR}.{key}={actor[key]} leaves verl's gspo unclipped: it bounds the geometric mean ratio per "
                "token; the authors recommend 3e-4 (low) and 4e-4 (high)"
            )


def _ignored_problems(config: DictConfig, loss_mode: str) -> Problems:
    actor = config.actor_rollout_ref.actor
    for key in _TOKEN_LEVEL_KEYS:
        if key in actor and actor[key] is not None and actor[key] != _default(key):
            yield (
                f"{_ACTOR}.{key}={actor[key]} is ignored by loss_mode={loss_mode}: remove it, and set "
                f"{_POLICY_LOSS}.clip_low, clip_high or dual_clip instead"
            )


def _clip_problems(settings: SequenceLossSettings) -> Problems:
    for key in ("clip_low", "clip_high"):
        value = getattr(settings, key)
        if settings.band == "linear" and value > _LINEAR_MAX:
            yield (
                f"{_POLICY_LOSS}.{key}={value} is per token for band=linear and would never clip: GSPO's authors "
                "recommend 3e-4 and 4e-4 (a value near 0.03 belongs to band=sqrt, FSPO)"
            )
        elif settings.band == "sqrt" and 0 < value < _SQRT_MIN:
            yield (
                f"{_POLICY_LOSS}.{key}={value} is per sqrt(token) for band=sqrt and would clip nearly every sequence: "
                "FSPO uses about 0.03 (a value near 3e-4 belongs to band=linear, GSPO)"
            )


def _micro_batch_problems(config: DictConfig) -> Problems:
    # A different padding changes rounding, and 1e-3 per token of spurious drift dwarfs a band of 3e-4 (verl#6280).
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.use_dynamic_bsz:
        pairs = (("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"),)
    else:
        pairs = (("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"),)
    for new, old in pairs:
        if actor[new] != rollout[old]:
            yield (
                f"{_ACTOR}.{new}={actor[new]} differs from actor_rollout_ref.rollout.{old}={rollout[old]}: old and new "
                "log-probabilities would be rounded differently; set them equal"
            )


def _rollout_correction_problems(config: DictConfig) -> Problems:
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode"):
        yield (
            "algorithm.rollout_correction.bypass_mode=true replaces the policy loss by verl's own: set it to false to "
            "train with a sequence-level loss"
        )
    if correction.get("rollout_is") not in (None, "sequence"):
        yield (
            f"algorithm.rollout_correction.rollout_is={correction.get('rollout_is')!r} gives one weight per token, and "
            "a sequence-level loss has one per sequence: set it to 'sequence' or null"
        )
