"""Typed settings of the method, ``fspo.*`` and those of the sequence-level losses, and the rules that are the method's.

A rule stands here if the mistake would give wrong numbers in silence; :data:`RULES` is the table, as in
:mod:`recipe.runner.launch.checks`. Where a rule has a public reference, the comment gives it (verl#N: issue or pull
request N of verl).
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Final, Literal

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from recipe.fspo import CONF_DIR
from recipe.runner.launch.checks import Rule
from recipe.runner.launch.trial import correction_problems, estimator_problems, library_problem
from recipe.runner.launch.values import Count, Positive, Share, type_problems, types_of

from fspo.losses import ALGORITHMS, LOSSES, resolve_settings
from fspo.names import did_you_mean
from fspo.types import NO_CLIP, SequenceLossSettings, eps_of_c
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

_ACTOR: Final = "actor_rollout_ref.actor"
_POLICY_LOSS: Final = f"{_ACTOR}.policy_loss"
_ROLLOUT: Final = "actor_rollout_ref.rollout"

#: Values of ``trainer.v1.trainer_mode`` that name a trainer of this recipe.
TRAINER_MODES: Final = ("fspo", "fspo_colocate_async", "fspo_separate_async")
#: Advantage estimators that compare the responses to one prompt, and need at least two.
GROUP_ESTIMATORS: Final = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "grpo_passk")
#: Advantage estimators with a value per token.
_TOKEN_ESTIMATORS: Final = ("gae", "optimal_token_baseline", "tir_optimal_token_baseline")
#: A clip value so many times the published one, at the longest response, is that of another exponent or loss:
#: frameworks have shipped PPO's 0.2 in place of GSPO's 3e-4 by mistake. Measured ones were up to 34 times it.
_FACTOR: Final = 50.0


@dataclass(frozen=True)
class FspoSettings:
    """The settings ``fspo.*``; ``conf/base.yaml`` has their values and says what each does."""

    window_steps: Count
    kl_to_start: bool
    pi_old: Literal["actor", "rollout"]
    accept_uncorrected: bool
    calibration_rounds: Count
    reference_length: Positive | None
    match_scale: Literal["matched", "native"]
    clip_values: Literal["measured", "published"] | None
    accept: Share


@dataclass
class SequencePolicyLossConfig(PolicyLossConfig):
    """Settings of ``fspo``, ``seq_rloo``, ``seq_gspo`` and the others of their family.

    A field left at ``None`` takes the value of the loss that ``loss_mode`` names (:data:`fspo.losses.ALGORITHMS`); the
    meaning, unit and range of each is documented at :class:`fspo.types.SequenceLossSettings`.

    Raises:
        ValueError: if ``loss_mode`` is not a sequence-level loss, or a value is out of range or contradicts another;
            the message names the key, the value and what to set instead.
    """

    loss_mode: str = "fspo"
    band: str | None = None
    exponent: float | None = None
    c_low: float | None = None
    c_high: float | None = None
    drift: str | None = None
    weight: str | None = None
    grad_scale: str | None = None
    grad_multiplier: float | None = None
    s_max: float | None = None
    target_acceptance: float | None = None
    clip_low: InitVar[object] = None
    clip_high: InitVar[object] = None

    def __post_init__(self, clip_low: object, clip_high: object) -> None:
        self.settings(clip_low=clip_low, clip_high=clip_high)

    def settings(self, **refused: object) -> SequenceLossSettings:
        """The loss library's settings: those that ``loss_mode`` names, overridden by the fields that are set."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        try:
            settings = resolve_settings(values | refused)
        except ValueError as error:
            raise ValueError(f"{_POLICY_LOSS}.{error}") from None
        if settings is None:
            raise ValueError(
                f"{_POLICY_LOSS}.loss_mode={self.loss_mode!r} is not a sequence-level loss; choose one of "
                f"{', '.join(ALGORITHMS)}, or set _target_=verl.workers.config.PolicyLossConfig for a loss of verl's"
            )
        return settings


# ---------------------------------------------------------------- losses that are none of fspo.losses.ALGORITHMS

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
        'have the field grad_scale ("1" for a sum over tokens, "1/L" for a mean)'
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


def _class_problems(config: DictConfig) -> Iterator[str]:
    """What is wrong with the class of settings of a loss that is none of this repository's.

    ``actor.policy_loss._target_`` names it (docs/extending.md). It says by fields what the rest of the recipe may do
    with the loss: ``grad_scale``, how its gradient grows with L ("1": a sum over tokens, which
    ``fspo.match_scale=matched`` divides by a typical length; "1/L": a mean); ``band``, in words, for the report.
    """
    actor = config.actor_rollout_ref.actor
    loss_mode, target = actor.policy_loss.loss_mode, actor.policy_loss.get("_target_")
    if problem := library_problem(config):
        yield problem
    elif lacks_its_class(actor.policy_loss):
        named = f"{_POLICY_LOSS}.loss_mode={loss_mode}"
        if loss_mode not in {*POLICY_LOSS_REGISTRY, *ALGORITHMS}:  # said where it is tried
            return
        if target:
            yield f"{named} has other settings than those of _target_={target}: give {overrides_of(loss_mode)}"
        else:
            way = f"leave ~{_POLICY_LOSS}._target_ out, and give {overrides_of(loss_mode)}"
            yield f"{named} without _target_ has no settings: {way}"
    elif loss_mode not in ALGORITHMS:
        try:
            settings_of(actor.policy_loss)  # imports the class's module, which registers the loss
        except InstantiationException as error:
            yield f"{_POLICY_LOSS}._target_={target}: {_reason(error, actor)}"


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


def trained_settings(policy_loss: Any) -> SequenceLossSettings:
    """What a loss of :data:`fspo.losses.ALGORITHMS` trains with, by ``actor.policy_loss`` as a worker has it.

    Fields that verl's own class has not are absent there, and have their defaults.
    """
    typed = isinstance(policy_loss, SequencePolicyLossConfig)
    return policy_loss.settings() if typed else ALGORITHMS[policy_loss.loss_mode]


def unmeasured(loss_mode: str, settings: SequenceLossSettings) -> str:
    """The problem of settings that need a state where nothing measures one: the key, its value, the remedy."""
    if ALGORITHMS[loss_mode].needs_state:
        setting, remedy = f"loss_mode={loss_mode}", "give loss_mode=fspo"
    else:
        setting = f"band={settings.band}" if settings.calibrated else f"drift={settings.drift}"
        remedy = "leave it out"
    return (
        f"{_POLICY_LOSS}.{setting} needs a band that is measured during training, and nothing here measures it: "
        f"{remedy}, or train with this recipe's trainer, which does: trainer.v1.trainer_mode=fspo"
    )


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
        config.fspo.clip_values = "published" if _keeps_clip_values(config) else "measured"


def complete_loss(config: DictConfig) -> None:
    """Write every setting of the loss into ``actor.policy_loss``, so that ``config.yaml`` says what was run; in place.

    A loss of the user's has the fields of its own class.
    """
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    settings = policy_loss_settings(policy_loss)
    why = _keeps_clip_values(config)
    could = _can_be_measured(policy_loss) and (policy_loss.get("c_low") or 0) < NO_CLIP
    if why and could and config.fspo.get("clip_values") != "published":
        print(f"note: clip values are not measured: {why}", flush=True)
    with open_dict(config.fspo):
        config.fspo.clip_values = "published" if why else "measured"
    if settings is not None:  # algo=grpo with loss_mode=fspo has verl's _target_, which knows none of these fields
        values = dataclasses.asdict(settings) | {"_target_": "recipe.fspo.config.SequencePolicyLossConfig"}
    elif is_users_loss(policy_loss):
        values = settings_of(policy_loss)
        if note := unknown_scale(config):
            print(f"note: {note}", flush=True)
    else:
        return
    with open_dict(policy_loss):
        policy_loss.update(values)


def _keeps_clip_values(config: DictConfig) -> str | None:
    """Why a run keeps the clip values that it begins with; None if it measures them. Of a loss not yet completed."""
    loss = config.actor_rollout_ref.actor.policy_loss
    if OmegaConf.select(config, "fspo.clip_values") == "published":
        return "fspo.clip_values=published"
    if not _can_be_measured(loss):
        return f"loss_mode={loss.loss_mode} has none that could be"
    if values := _clip_values_of(loss):
        return f"{_POLICY_LOSS} has {' and '.join(values)}"
    if config.get("evaluate"):
        return "evaluate=true trains nothing"
    return None


def _can_be_measured(loss: DictConfig) -> bool:
    try:
        settings = policy_loss_settings(loss)
    except ValueError:  # which is said elsewhere
        return False
    return settings is not None and not settings.calibrated


def _clip_values_of(loss: DictConfig) -> list[str]:
    """The clip values that a loss not yet completed has from the command line or from its algorithm's file."""
    return [f"{key}={loss[key]}" for key in ("c_low", "c_high") if loss.get(key) is not None]


def scales_with_length(policy_loss: DictConfig) -> bool:
    """Whether the gradient of a response grows with its length L: a sum over its tokens, h(L) = 1, and not a mean.

    The gradients of such losses (FSPO, RLOO, LUSPO) are about L times those of GSPO and of verl's token means, so a
    common gradient-norm clip would bind always for the ones and never for the others. ``fspo.match_scale=matched``
    divides them by a typical length. Of a loss of the user's the field ``grad_scale`` says it.
    """
    if (settings := policy_loss_settings(policy_loss)) is not None:
        return settings.grad_scale == "1"
    return is_users_loss(policy_loss) and settings_of(policy_loss).get("grad_scale") == "1"


def complete_mode(config: DictConfig) -> None:
    """Fill in how many mini-batches ``mode=separate_async`` trains between two transfers of the weights; in place."""
    separate_async = config.trainer.v1.separate_async
    if separate_async.parameter_sync_step is None:
        batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
        separate_async.parameter_sync_step = batch // mini


def problems(config: DictConfig) -> Iterator[str]:
    """Problems of the method's settings, alone and together with others."""
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    wrong = list(type_problems(OmegaConf.to_container(config.fspo, resolve=True), types_of(FspoSettings), "fspo."))
    if policy_loss.loss_mode in ALGORITHMS:  # algo=grpo with loss_mode=fspo names verl's class
        wrong += _loss_type_problems(policy_loss)
    if not wrong and policy_loss.loss_mode in ALGORITHMS:
        try:
            policy_loss_settings(policy_loss)
        except ValueError as error:
            wrong.append(str(error))
    yield from wrong or (problem for rule in RULES for problem in rule(config))


def _loss_type_problems(policy_loss: DictConfig) -> list[str]:
    values: Any = OmegaConf.to_container(policy_loss, resolve=True)
    return list(type_problems(values, types_of(SequencePolicyLossConfig), f"{_POLICY_LOSS}."))


def is_by_sequence(config: DictConfig) -> bool:
    """Whether the loss is one of this repository's, with one advantage and one ratio for each response."""
    return config.actor_rollout_ref.actor.policy_loss.loss_mode in ALGORITHMS


def _never_clips(config: DictConfig) -> bool:
    """Whether each rollout batch has one update only, in which S is 0, so that a band that could clip never does."""
    actor, loss = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    if actor.ppo_epochs * config.data.train_batch_size > actor.ppo_mini_batch_size:
        return False
    settings = policy_loss_settings(loss)
    if settings is None:
        return False
    return settings.needs_state or min(settings.c_low, settings.c_high) < NO_CLIP


def _is_ours(config: DictConfig) -> bool:
    """Whether verl's own command names a trainer of this recipe."""
    return config.trainer.v1.trainer_mode in TRAINER_MODES


def plain_notes(config: DictConfig) -> Iterator[str]:
    """What a plain command with a loss or a trainer of this repository measures or clips not, and why."""
    loss = config.actor_rollout_ref.actor.policy_loss
    measures_a_band = is_by_sequence(config) and not _can_be_measured(loss)
    if _is_ours(config) and not measures_a_band and (why := _keeps_clip_values(config)):
        yield f"clip values are not measured: {why}"
    correction = config.algorithm.get("rollout_correction") or {}
    mode = config.trainer.v1.trainer_mode if config.trainer.use_v1 else "sync"
    # separate_async trains several batches between two transfers of the weights, and S starts from the first.
    if not mode.endswith("separate_async") and not correction.get("bypass_mode") and _never_clips(config):
        mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
        yield (
            f"{_ACTOR}.ppo_mini_batch_size={mini_batch} is data.train_batch_size: a rollout batch has one update, in "
            "which S is 0 and nothing is ever clipped. Set it to a smaller divisor of the batch"
        )


def plain_problems(config: DictConfig) -> Iterator[str]:
    """Problems of a loss or a trainer of ours that plain verl would meet only in the first mini-batch, or never."""
    if _is_ours(config):
        import recipe.fspo.sqrt_mask  # noqa: F401  (a rule that the trainer adds)

        if problems := list(_plain_trainer_problems(config)):
            yield from problems
            return
        config = copy.deepcopy(config)
        complete_settings(config)
        yield from _ratio_problems(config)
        yield from _clip_problems(config)
    if is_by_sequence(config):
        yield from _plain_loss_problems(config)
        yield from _correction_problems(config)
        yield from _advantage_problems(config)
        yield from correction_problems(config)
        if config.trainer.use_v1:
            yield from estimator_problems(config)


def _plain_loss_problems(config: DictConfig) -> Iterator[str]:
    """Settings of the loss that are wrong, or need something that measures the band, which plain verl has not."""
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    if wrong := _loss_type_problems(policy_loss):
        yield from wrong
        return
    try:
        settings = trained_settings(instantiate(policy_loss, _convert_="partial"))
    except InstantiationException:  # a wrong value; or verl itself will name what its class does not know
        try:
            settings = resolve_settings(policy_loss) or ALGORITHMS[policy_loss.loss_mode]
        except ValueError as error:
            yield f"{_POLICY_LOSS}.{error}"
            return
    if settings.needs_state and not _is_ours(config):
        yield unmeasured(policy_loss.loss_mode, settings)


def _plain_trainer_problems(config: DictConfig) -> Iterator[str]:
    """Settings ``fspo.*`` that a command has added to verl's, and what else a trainer of this recipe needs there."""
    if not config.trainer.use_v1:
        yield f"trainer.use_v1=false reads no trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: leave it out"
    known = [field.name for field in dataclasses.fields(FspoSettings)]
    settings = config.get("fspo") or {}
    for name in settings:
        if name not in known:
            yield f"fspo.{name} does not exist{did_you_mean(name, known)}; there are {', '.join(known)}"
    yield from type_problems(OmegaConf.to_container(OmegaConf.create(settings)), types_of(FspoSettings), "fspo.")
    if settings.get("clip_values") == "measured" and not _can_be_measured(config.actor_rollout_ref.actor.policy_loss):
        loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield (
            f"fspo.clip_values=measured: loss_mode={loss_mode} has none that could be measured: leave it out, or give "
            f"{_POLICY_LOSS}.loss_mode=fspo"
        )


def _ratio_problems(config: DictConfig) -> Iterator[str]:
    """Settings that make S or the importance ratios wrong, whoever trains."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.get("rollout_correction") or {}
    corrects = correction.get("rollout_is") is not None or correction.get("rollout_rs") is not None
    by_rollout = config.fspo.pi_old == "rollout"
    needs = "fspo.pi_old=rollout" if by_rollout else "algorithm.rollout_correction"
    truncated = [
        f"{_ROLLOUT}.{name}={rollout[name]}" for name, off in (("top_p", 1), ("top_k", -1)) if rollout[name] != off
    ]
    if (corrects or by_rollout) and not rollout.calculate_log_probs:
        yield f"{_ROLLOUT}.calculate_log_probs=false: {needs} needs vLLM's log-probabilities; set it to true"
    if corrects and by_rollout:
        yield (
            "algorithm.rollout_correction has no effect with fspo.pi_old=rollout: it compares vLLM's log-probabilities "
            "with themselves; set fspo.pi_old to actor, or rollout_is and rollout_rs to null"
        )
    asynchronous = str(config.trainer.v1.trainer_mode).endswith("_async")
    if asynchronous and not (corrects or by_rollout or config.fspo.accept_uncorrected):
        yield (
            "algorithm.rollout_correction.rollout_rs=null uses responses of old weights, though S is measured from "
            "newer ones, however far apart: set it to seq_sqrt_k1, fspo.pi_old to rollout, or accept it by "
            "fspo.accept_uncorrected=true (docs/async.md)"
        )
    # Truncated sampling: the log-probabilities are those of another distribution (trl#6789).
    if truncated:
        yield (
            f"{', '.join(truncated)} cuts the sampling distribution, so importance ratios are biased: set top_p=1 and "
            "top_k=-1 (val_kwargs has its own)"
        )


def _setting_problems(config: DictConfig) -> Iterator[str]:
    """Settings that contradict each other in a run, or make L wrong."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mode = config.trainer.v1.trainer_mode
    unit = "max_token_len" if actor.use_dynamic_bsz else "micro_batch_size"
    new, old = f"ppo_{unit}_per_gpu", f"log_prob_{unit}_per_gpu"
    mini_batch = actor.ppo_mini_batch_size
    for wrong, setting, why in (
        (
            mode not in TRAINER_MODES,
            f"trainer.v1.trainer_mode={mode}",
            "is a trainer of verl's that would leave the run folder empty, without metrics, checks or resume: give "
            "mode=sync, colocate_async or separate_async, or train with plain verl, which knows the losses too (python "
            "-m verl.trainer.main_ppo)",
        ),
        # 1e-3 per token of spurious drift dwarfs a band of 3e-4 (verl#6280).
        (
            is_by_sequence(config) and actor[new] != rollout[old],
            f"{_ACTOR}.{new}={actor[new]}",
            f"differs from {_ROLLOUT}.{old}={rollout[old]}: old and new log-probabilities would be rounded "
            "differently; set them equal",
        ),
        (
            mode == "fspo" and config.fspo.pi_old != "rollout" and not config.evaluate and _never_clips(config),
            f"{_ACTOR}.ppo_mini_batch_size={mini_batch}",
            f"is data.train_batch_size={config.data.train_batch_size}: a rollout batch has one update, in which S is 0 "
            "and nothing is ever clipped. Set it to a smaller divisor of the batch, or take algo=unclipped",
        ),
    ):
        if wrong:
            yield f"{setting} {why}"


def _correction_problems(config: DictConfig) -> Iterator[str]:
    """A rollout correction that replaces the loss, or acts on tokens of which the loss has none."""
    correction = config.algorithm.get("rollout_correction") or {}
    weights, rules = correction.get("rollout_is"), correction.get("rollout_rs")
    by_token = "token_" in str(rules)
    for key, wrong, why in (
        ("bypass_mode", correction.get("bypass_mode"), "replaces the loss by verl's own: set it to false"),
        ("rollout_is", weights not in (None, "sequence"), "is one weight per token: set it to sequence or null"),
        ("rollout_rs", by_token, "removes tokens, and S and L would be those of the rest: take a rule seq_..."),
    ):
        if wrong and is_by_sequence(config):
            yield f"algorithm.rollout_correction.{key}={correction[key]} {why} (docs/async.md)"


def _advantage_problems(config: DictConfig) -> Iterator[str]:
    """Groups of one response, and advantages per token where the loss has one per response."""
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    estimator = str(algorithm.adv_estimator)
    if estimator in GROUP_ESTIMATORS and n < 2:
        yield (
            f"algorithm.adv_estimator={estimator} compares the responses to one prompt, but {_ROLLOUT}.n={n}: set it "
            "to 2 or more"
        )
    discounts = algorithm.gamma != 1 or algorithm.use_kl_in_reward
    by_token = estimator in _TOKEN_ESTIMATORS or (estimator == "reinforce_plus_plus" and discounts)
    if by_token and is_by_sequence(config):
        yield (
            f"algorithm.adv_estimator={estimator} with algorithm.gamma={algorithm.gamma} and "
            f"use_kl_in_reward={algorithm.use_kl_in_reward} gives an advantage per token, and a sequence-level loss "
            "needs one per response: set it to grpo or rloo, or use a token-level loss (algo=grpo)"
        )


def _clip_problems(config: DictConfig) -> Iterator[str]:
    """Clip values that are those of another exponent, or of another loss."""
    actor, length = config.actor_rollout_ref.actor, config.data.max_response_length
    loss_mode, settings = actor.policy_loss.loss_mode, policy_loss_settings(actor.policy_loss)
    values: dict[str, tuple[float | None, float]] = {}
    if loss_mode == "gspo" and not lacks_its_class(actor.policy_loss):
        loss = LOSSES["seq_gspo"]
        usual = eps_of_c(loss.settings.c_low, loss.settings.c_high)
        keys = ("clip_ratio_low", "clip_ratio_high")
        values = {f"{_ACTOR}.{key}": (actor[key], eps) for key, eps in zip(keys, usual, strict=True)}
    elif settings is not None:
        if config.fspo.get("clip_values") == "measured" and (own := _clip_values_of(actor.policy_loss)):
            both = " and ".join(own)
            yield f"fspo.clip_values=measured does not go with {_POLICY_LOSS}.{both}: leave one of them out"
        loss = LOSSES[loss_mode]
        growth = float(length) ** (loss.settings.exponent - settings.exponent)
        values = {
            f"{_POLICY_LOSS}.{key}": (getattr(settings, key), getattr(loss.settings, key) * growth)
            for key in ("c_low", "c_high")
        }
    for key, (value, usual_value) in values.items():
        if value and value < NO_CLIP and not 1 / _FACTOR <= value / usual_value <= _FACTOR:
            effect = "clip nearly every sequence" if value < usual_value else "never clip"
            yield (
                f"{key}={value} would {effect}: at {length} tokens {usual_value:.3g} is as wide as {loss.source} "
                "(docs/algorithms.md)"
            )


def recorded_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Why a run with these recorded settings cannot go on: those of its loss have another meaning now, or none."""
    loss: Any = settings
    for name in _POLICY_LOSS.split("."):
        loss = loss.get(name) if isinstance(loss, Mapping) else None
    try:
        resolve_settings(loss if isinstance(loss, Mapping) else {})
    except (TypeError, ValueError) as error:
        yield f"{_POLICY_LOSS}.{error}"


#: The table.
RULES: Final[tuple[Rule, ...]] = (
    _class_problems,  # first, because it imports the module of an own loss, which may register more than a loss
    _setting_problems,
    _ratio_problems,
    _correction_problems,
    _advantage_problems,
    _clip_problems,
)
