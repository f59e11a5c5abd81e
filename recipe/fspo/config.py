"""Typed settings of the sequence-level losses, as verl instantiates them, and what settings mean together.

:func:`problems` is said before Ray starts: nothing that contradicts itself or would be ignored goes on in silence. Each
problem names the key, the value and what to set instead. Where a rule has a public reference, the comment gives it
(verl#N: issue or pull request N of verl).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from fspo.losses import ALGORITHMS, resolve_settings
from fspo.relatives import RELATIVES
from fspo.types import SequenceLossSettings
from recipe.fspo import own_loss
from recipe.runner.launch.served import unserved

_ACTOR = "actor_rollout_ref.actor"
_POLICY_LOSS = f"{_ACTOR}.policy_loss"

#: Keys of the actor that token-level losses read and the sequence-level ones do not.
_TOKEN_LEVEL_KEYS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
#: Which of them each of the other losses reads.
_CLIP_RATIOS = ("clip_ratio_low", "clip_ratio_high")
_READ_BY: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("vanilla", "dppo_tv", "dppo_kl", "gspo"), (*_CLIP_RATIOS, "clip_ratio_c")),  # gspo: below
    **dict.fromkeys(("cispo", "geo_mean"), _CLIP_RATIOS),
    "sapo": ("tau_pos", "tau_neg"),
    **dict.fromkeys(RELATIVES, ()),
}
#: Advantage estimators that compare the responses to one prompt, and need at least two.
_GROUP_ESTIMATORS = frozenset({"grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "grpo_passk"})
#: A clip value per token (linear band) above this, or per sqrt(token) below it, belongs to the other algorithm:
#: GSPO's authors recommend 3e-4 / 4e-4 (verl#2775), FSPO's is about 0.03; frameworks have shipped 0.2 by mistake.
_LINEAR_MAX, _SQRT_MIN = 0.01, 0.003
#: A clip value per sqrt(token) from here on is an eps (0.2 is PPO's): 0.15 sqrt(2000) are 6.7 nats.
_SQRT_MAX = 0.15
#: From here on a band of c sqrt(L) is meant to be none: algo=unclipped.
_NO_CLIP = 1e9


@dataclass
class SequencePolicyLossConfig(PolicyLossConfig):
    """Settings of ``fspo``, ``seq_rloo``, ``seq_gspo`` and their relatives.

    A field left at ``None`` takes the value of the loss that ``loss_mode`` names (:data:`fspo.losses.ALGORITHMS`); the
    meaning, unit and range of each is documented at :class:`fspo.types.SequenceLossSettings`.

    Raises:
        ValueError: if ``loss_mode`` is not a sequence-level loss, or a value is out of range or contradicts another;
            the message names the key, the value and what to set instead.
    """

    loss_mode: str = "fspo"
    band: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    drift: str | None = None
    weight: str | None = None
    grad_scale: str | None = None
    grad_multiplier: float | None = None
    s_max: float | None = None
    target_acceptance: float | None = None

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> SequenceLossSettings:
        """The loss library's settings: those that ``loss_mode`` names, overridden by the fields that are set."""
        try:
            settings = resolve_settings({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        except ValueError as error:
            raise ValueError(f"{_POLICY_LOSS}.{error}") from None
        if settings is None:
            raise ValueError(
                f"{_POLICY_LOSS}.loss_mode={self.loss_mode!r} is not a sequence-level loss; choose one of "
                f"{', '.join(ALGORITHMS)}, or remove _target_ to use one of verl's own losses"
            )
        return settings


def policy_loss_settings(policy_loss: DictConfig) -> SequenceLossSettings | None:
    """The loss library's settings for a composed ``actor.policy_loss``; None if it names a loss of another family.

    Raises:
        ValueError: for a value out of range, a contradiction or an unknown key.
    """
    values = OmegaConf.to_container(policy_loss, resolve=True)
    if values["loss_mode"] not in ALGORITHMS:
        return None
    values.pop("_target_", None)
    known = {field.name for field in dataclasses.fields(SequencePolicyLossConfig)} - {"_target_"}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{_POLICY_LOSS} has no key {', '.join(unknown)}; the keys are {', '.join(sorted(known))}")
    return SequencePolicyLossConfig(**values).settings()


def complete_loss(config: DictConfig) -> None:
    """Write every setting of the loss into ``actor.policy_loss``, so that ``config.yaml`` says what was run; in place.

    With ``match_scale=matched``, the losses that sum over tokens are divided by ``fspo.reference_length``: the
    gradients of losses with h(L) = 1 (FSPO, RLOO, LUSPO) are about L times those of GSPO and of verl's token means, so
    a common gradient-norm clip would bind always for the ones and never for the others. Defined here. A loss of the
    user's has its own fields for it (:mod:`recipe.fspo.own_loss`).
    """
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    settings = policy_loss_settings(policy_loss)
    if settings is not None:  # algo=grpo with loss_mode=fspo has verl's _target_, which knows none of these fields
        values = dataclasses.asdict(settings) | {"_target_": "recipe.fspo.config.SequencePolicyLossConfig"}
    elif own_loss.is_own(policy_loss):
        values = own_loss.settings_of(policy_loss)
    else:
        return
    if config.fspo.match_scale == "matched" and values.get("grad_scale") == "1":
        values["grad_multiplier"] /= config.fspo.reference_length
    with open_dict(policy_loss):
        policy_loss.update(values)


def complete_mode(config: DictConfig) -> None:
    """Fill in how many mini-batches ``mode=separate_async`` trains between two transfers of the weights; in place."""
    separate_async = config.trainer.v1.separate_async
    if separate_async.parameter_sync_step is None:
        batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
        separate_async.parameter_sync_step = batch // mini


def problems(config: DictConfig) -> Iterator[str]:
    """Everything that contradicts itself or would be ignored: mode, loss and statistics that ``config`` names."""
    yield from _mode_problems(config)
    yield from _pi_old_problems(config)
    yield from _unused_correction_problems(config)
    yield from _drop_problems(config)
    yield from loss_problems(config)  # imports the module of an own loss, which may register more than a loss
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    yield from unserved(config, by_response=loss_mode in ALGORITHMS or loss_mode in RELATIVES)


def _pi_old_problems(config: DictConfig) -> Iterator[str]:
    if config.fspo.pi_old not in ("actor", "rollout"):
        yield f"fspo.pi_old={config.fspo.pi_old} must be actor or rollout (docs/async.md)"
    elif config.fspo.pi_old == "rollout" and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield "fspo.pi_old=rollout needs actor_rollout_ref.rollout.calculate_log_probs=true: vLLM's log-probabilities"


def _drop_problems(config: DictConfig) -> Iterator[str]:
    sampler = config.trainer.v1.sampler
    if config.fspo.drop not in ("stale", "evenly"):
        yield f"fspo.drop={config.fspo.drop} must be stale or evenly (docs/async.md)"
    elif config.fspo.drop == "evenly":
        for wrong, what in (
            (config.trainer.v1.trainer_mode == "fspo", "mode=sync, where nothing is dropped"),
            (sampler.max_off_policy_strategy != "drop", "max_off_policy_strategy=wait, which drops nothing"),
            (sampler.max_off_policy_threshold is None, "max_off_policy_threshold=null, where nothing is stale"),
            (bool(sampler.custom_sampler.path), "a custom_sampler, which drops by its own rule"),
        ):
            if wrong:
                yield f"fspo.drop=evenly has no effect with {what}: set one of the two to its default"


def _mode_problems(config: DictConfig) -> Iterator[str]:
    if config.trainer.v1.trainer_mode != "fspo_separate_async":
        return
    rollout = config.actor_rollout_ref.rollout
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    steps = config.trainer.v1.separate_async.parameter_sync_step
    if steps is not None and steps * mini != batch:
        yield (
            f"trainer.v1.separate_async.parameter_sync_step={steps} times actor.ppo_mini_batch_size={mini} is not "
            f"data.train_batch_size={batch}: leave it out, so that it follows from the two"
        )
    if rollout.nnodes < 1 or rollout.n_gpus_per_node < 1:
        yield (
            f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} and n_gpus_per_node={rollout.n_gpus_per_node}: with "
            "mode=separate_async some devices only generate; give 1 or more of each"
        )
    if rollout.checkpoint_engine.backend == "naive":
        yield (
            "actor_rollout_ref.rollout.checkpoint_engine.backend=naive cannot carry weights between devices: give "
            "nccl, or shared_memory with custom_backend_module=recipe.runner.cpu.checkpoint_engine on CPUs"
        )


def _default(key: str) -> Any:
    return FSDPActorConfig.__dataclass_fields__[key].default


def loss_problems(config: DictConfig) -> Iterator[str]:
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
    length = config.fspo.reference_length
    needed = settings is not None or own_loss.is_own(policy_loss)
    if needed and config.fspo.match_scale == "matched" and (not isinstance(length, int | float) or length <= 0):
        yield f"fspo.reference_length={length!r}: match_scale=matched needs a typical length of responses, above 0"
    if settings is None:
        yield from own_loss.problems(config)
        yield from _unread_problems(config, policy_loss.loss_mode)
        if policy_loss.loss_mode in RELATIVES:
            yield from _micro_batch_problems(config)
            yield from _rollout_correction_problems(config)
        return
    yield from _ignored_problems(config, policy_loss.loss_mode)
    if config.fspo.comparison == "default":  # matched clip values are measured, and may be as wide as a run needs
        yield from _clip_problems(settings)
    yield from _micro_batch_problems(config)
    yield from _rollout_correction_problems(config)


def _sampling_problems(config: DictConfig) -> Iterator[str]:
    # Truncated sampling makes the sampled distribution another than the policy whose log-probs are taken (trl#6789).
    rollout = config.actor_rollout_ref.rollout
    for key, neutral in (("top_p", 1), ("top_k", -1)):
        if rollout[key] != neutral:
            yield (
                f"actor_rollout_ref.rollout.{key}={rollout[key]} cuts the sampling distribution, so importance ratios "
                f"are biased: set it to {neutral} (validation has its own val_kwargs.{key})"
            )


def _group_problems(config: DictConfig) -> Iterator[str]:
    estimator, n = str(config.algorithm.adv_estimator), config.actor_rollout_ref.rollout.n
    if estimator in _GROUP_ESTIMATORS and n < 2:
        yield (
            f"algorithm.adv_estimator={estimator} compares the responses to one prompt, but "
            f"actor_rollout_ref.rollout.n={n}: set it to 2 or more"
        )


def _stock_gspo_problems(config: DictConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.clip_ratio_c != _default("clip_ratio_c"):
        yield f"{_ACTOR}.clip_ratio_c={actor.clip_ratio_c} is ignored by verl's gspo: leave it at its default"
    for key in ("clip_ratio_low", "clip_ratio_high"):
        if actor[key] is not None and actor[key] > _LINEAR_MAX:
            yield (
                f"{_ACTOR}.{key}={actor[key]} leaves verl's gspo unclipped: it bounds the geometric mean ratio per "
                "token; the authors recommend 3e-4 (low) and 4e-4 (high)"
            )


def _ignored_problems(config: DictConfig, loss_mode: str) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    for key in _TOKEN_LEVEL_KEYS:
        if key in actor and actor[key] is not None and actor[key] != _default(key):
            yield (
                f"{_ACTOR}.{key}={actor[key]} is ignored by loss_mode={loss_mode}: remove it, and set "
                f"{_POLICY_LOSS}.clip_low or clip_high instead"
            )


def _unread_problems(config: DictConfig, loss_mode: str) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if loss_mode not in _READ_BY:
        return
    for key in _TOKEN_LEVEL_KEYS:
        # verl's losses read clip_ratio where one of the other two is null.
        read = key in _READ_BY[loss_mode] or (key == "clip_ratio" and None in (actor[each] for each in _CLIP_RATIOS))
        if not read and actor[key] is not None and actor[key] != _default(key):
            used = ", ".join(_READ_BY[loss_mode])
            yield (
                f"{_ACTOR}.{key}={actor[key]} is ignored by loss_mode={loss_mode}"
                f"{f', which reads {used}' if used else ''}: leave it at its default"
            )


def _clip_problems(settings: SequenceLossSettings) -> Iterator[str]:
    for key in ("clip_low", "clip_high"):
        value = getattr(settings, key)
        if settings.band == "linear" and value > _LINEAR_MAX:
            yield (
                f"{_POLICY_LOSS}.{key}={value} is per token for band=linear and would never clip: GSPO's authors "
                "recommend 3e-4 and 4e-4 (a value near 0.03 belongs to band=sqrt, FSPO)"
            )
        elif settings.band == "sqrt" and _SQRT_MAX <= value < _NO_CLIP:
            yield (
                f"{_POLICY_LOSS}.{key}={value} is per sqrt(token) for band=sqrt and would never clip: FSPO uses about "
                "0.03 (a value near 0.2 belongs to band=constant, RLOO)"
            )
        elif settings.band == "sqrt" and 0 < value < _SQRT_MIN:
            yield (
                f"{_POLICY_LOSS}.{key}={value} is per sqrt(token) for band=sqrt and would clip nearly every sequence: "
                "FSPO uses about 0.03 (a value near 3e-4 belongs to band=linear, GSPO)"
            )


def _micro_batch_problems(config: DictConfig) -> Iterator[str]:
    # A different padding changes rounding, and 1e-3 per token of spurious drift dwarfs a band of 3e-4 (verl#6280).
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.use_dynamic_bsz:
        new, old = "ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"
    else:
        new, old = "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"
    if actor[new] != rollout[old]:
        yield (
            f"{_ACTOR}.{new}={actor[new]} differs from actor_rollout_ref.rollout.{old}={rollout[old]}: old and new "
            "log-probabilities would be rounded differently; set them equal"
        )


def _rollout_correction_problems(config: DictConfig) -> Iterator[str]:
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode"):
        yield (
            "algorithm.rollout_correction.bypass_mode=true replaces the policy loss by verl's own: set it to false to "
            "train with a sequence-level loss (fspo.pi_old=rollout spares the same forward pass)"
        )
    if correction.get("rollout_is") not in (None, "sequence"):
        yield (
            f"algorithm.rollout_correction.rollout_is={correction.get('rollout_is')!r} gives one weight per token, and "
            "a sequence-level loss has one per sequence: set it to 'sequence' or null"
        )
    if "token_" in str(correction.get("rollout_rs")):
        yield (
            f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs} removes single tokens, and S and L would "
            "be those of the rest: take a rule for whole responses (seq_...), or null"
        )


def _unused_correction_problems(config: DictConfig) -> Iterator[str]:
    correction = config.algorithm.get("rollout_correction") or {}
    weights, rules = correction.get("rollout_is"), correction.get("rollout_rs")
    if weights is None and rules is None:
        return
    if config.fspo.pi_old == "rollout":
        yield (
            "algorithm.rollout_correction has no effect with fspo.pi_old=rollout: it compares vLLM's log-probabilities "
            "with themselves; set fspo.pi_old to actor, or rollout_is and rollout_rs to null"
        )
    elif not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield (
            "algorithm.rollout_correction has no effect with actor_rollout_ref.rollout.calculate_log_probs=false: set "
            "it to true"
        )
    # Here and not above: the module imports verl's engines. It reads the thresholds, so that a wrong one says so now.
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

    mask_BT = torch.ones(1, 1)
    try:
        if rules is not None:
            compute_rollout_rejection_mask(0 * mask_BT, mask_BT, rules, correction.get("rollout_rs_threshold"))
        if weights is not None:
            compute_rollout_correction_weights(0 * mask_BT, mask_BT, weights, correction.get("rollout_is_threshold"))
    except (TypeError, ValueError) as error:
        yield f"algorithm.rollout_correction: {error}"
