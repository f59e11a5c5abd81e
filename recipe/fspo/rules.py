"""The rules of the method, for a run and for a plain command of verl's, before Ray starts.

A rule stands here if the mistake would give wrong numbers in silence; :data:`RULES` is the table, as in
:mod:`recipe.runner.launch.checks`. Where a rule has a public reference, the comment gives it (verl#N: issue or pull
request N of verl). Only a driver imports this module: it tries settings as the runner does.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from recipe.fspo import CONF_DIR, TRAINER_MODES
from recipe.fspo.config import (
    GROUP_ESTIMATORS,
    can_be_measured,
    clip_values_of,
    complete_settings,
    is_by_sequence,
    keeps_clip_values,
    own_scale,
    policy_loss_settings,
    settings_of,
)
from recipe.runner.checkpoints.integrity import TRACKER_FILE
from recipe.runner.launch.attempt import INSTALL, attempt, in_words
from recipe.runner.launch.checks import Rule
from recipe.runner.launch.compose import as_written, is_group
from recipe.runner.launch.trial import (
    correction_problems,
    estimator_problems,
    library_problem,
    loss_problems,
    why_zero_advantages_count,
)
from recipe.runner.launch.values import Share, kind_problems, type_problems, types_of

from fspo.files import folder_problem
from fspo.losses import ALGORITHMS, LOSSES, resolve_settings
from fspo.table import FOLDER, holds_table
from fspo.types import NO_CLIP, eps_of_c
from fspo.verl import SequencePolicyLossConfig, trained_settings, unmeasured
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

_ACTOR: Final = "actor_rollout_ref.actor"
_POLICY_LOSS: Final = f"{_ACTOR}.policy_loss"
_ROLLOUT: Final = "actor_rollout_ref.rollout"

#: Advantage estimators with a value per token.
_TOKEN_ESTIMATORS: Final = ("gae", "optimal_token_baseline", "tir_optimal_token_baseline")
#: A clip value so many times the published one, at the longest response, is that of another exponent or loss:
#: frameworks have shipped PPO's 0.2 in place of GSPO's 3e-4 by mistake. Measured ones were up to 34 times it.
_FACTOR: Final = 50.0
#: verl's default of ``clip_ratio`` and of both its sides.
_VERLS_CLIP_RATIO: Final = 0.2
#: vLLM samples at this temperature where a lower one is asked for, and the trainer divides the logits by that.
_LOWEST_TEMPERATURE: Final = 0.01
#: The class of settings of this recipe's losses.
_OUR_CLASS: Final = "fspo.verl.SequencePolicyLossConfig"
#: That of verl's, which algo=grpo has: with a loss of this recipe's it becomes the other.
_VERLS_CLASS: Final = r"verl\.workers\.config\.(?:actor\.)?PolicyLossConfig"
#: What a loss of verl's needs beside its name.
_NEEDED: Final = {
    "dro": f" {_POLICY_LOSS}.dro_beta=0.1",
    "bypass_mode": " algorithm.rollout_correction.bypass_mode=true",
}


@dataclass(frozen=True)
class FspoSettings:
    """The settings ``fspo.*``; ``conf/base.yaml`` has their values and says what each does."""

    kl_to_start: bool
    match_scale: Literal["matched", "native"]
    clip_values: Literal["measured", "published"] | None
    accept: Share
    skip_zero_advantage: bool | None


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

    ``actor.policy_loss._target_`` names it (docs/architecture.md). It says by fields what the rest of the recipe may do
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
        # Imports the class's module, which registers the loss.
        error = attempt(lambda: settings_of(actor.policy_loss))[1]
        if error is not None and (misplaced := _of_the_actor(actor, error)):
            for name in misplaced:
                yield (
                    f"{_POLICY_LOSS}.{name}={as_written(actor.policy_loss[name])}: there is no "
                    f"{_POLICY_LOSS}.{name}; use {_ACTOR}.{name}"
                )
        elif error is not None:
            yield f"{_POLICY_LOSS}._target_={target}: {_reason(error)}"
    elif target != _OUR_CLASS and not re.fullmatch(_VERLS_CLASS, target):
        yield (
            f"{_POLICY_LOSS}._target_={target} would not be used: {_POLICY_LOSS}.loss_mode={loss_mode} has a class of "
            "settings; leave _target_ out, or give the loss_mode that is registered with your class"
        )
    elif (loss := POLICY_LOSS_REGISTRY.get(loss_mode)) and inspect.unwrap(loss).__module__ != "fspo.verl":
        yield (
            f"{_POLICY_LOSS}.loss_mode={loss_mode} is a loss of this recipe's, and {inspect.unwrap(loss).__module__} "
            "registers another one by that name: give yours a name of its own"
        )


def _of_the_actor(actor: DictConfig, error: BaseException) -> list[str]:
    """Keys that the loss's class does not take and that the actor has, where they are what is wrong with it."""
    if "unexpected keyword argument" not in str(error.__cause__):
        return []
    taken = inspect.signature(get_object(actor.policy_loss._target_)).parameters
    return [name for name in actor.policy_loss if name not in taken and name in actor and name != "_target_"]


def _reason(error: BaseException) -> str:
    """Why a class of settings could not be made, and the remedy where that is not in the reason."""
    cause = error.__cause__ or error
    if not isinstance(cause, ValueError | TypeError | ImportError):
        return in_words(cause)  # such as KeyError, whose text is a key
    text = " ".join(str(cause).split())
    return f"{text}: {INSTALL}" if isinstance(cause, ImportError) else text


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
    return OmegaConf.select(config, "trainer.v1.trainer_mode") in TRAINER_MODES


def complete_skipping(config: DictConfig) -> str | None:
    """Fill in ``fspo.skip_zero_advantage``, in place: true where it changes no gradient; else false, and a note why."""
    if config.fspo.skip_zero_advantage is not None:
        return None
    why = counts_zero_advantages(config)
    config.fspo.skip_zero_advantage = why is None
    return None if why is None else f"responses without a gradient are not left out (fspo.skip_zero_advantage): {why}"


def counts_zero_advantages(config: DictConfig) -> str | None:
    """Why leaving out responses without a gradient would change that of others; None if it does not."""
    return why_zero_advantages_count(config, loss_is_known=is_by_sequence(config))


def complete_plain(config: DictConfig) -> str | None:
    """Fill in the settings of a trainer of ours in plain verl's driver, which hands them to the trainer, in place.

    Returns:
        A note on a default that cannot be on, or None.
    """
    if not _is_ours(config):
        return None
    complete_settings(config)
    return complete_skipping(config)


def plain_notes(config: DictConfig) -> Iterator[str]:
    """What a plain command with a loss or a trainer of this repository measures or clips not, and why."""
    if not (_is_ours(config) or is_by_sequence(config)):
        return
    if note := idle_penalty(config):
        yield note
    loss = config.actor_rollout_ref.actor.policy_loss
    measures_a_band = is_by_sequence(config) and not can_be_measured(loss)
    if _is_ours(config) and not measures_a_band and (why := keeps_clip_values(config)):
        yield f"clip values are not measured: {why}"
    if _is_ours(config) and (note := own_scale(config)):
        yield note
    correction = config.algorithm.get("rollout_correction") or {}
    mode = config.trainer.v1.trainer_mode if config.trainer.use_v1 else "sync"
    # separate_async trains several batches between two transfers of the weights, and S starts from the first.
    if not mode.endswith("separate_async") and not correction.get("bypass_mode") and _never_clips(config):
        mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
        yield (
            f"{_ACTOR}.ppo_mini_batch_size={mini_batch} is data.train_batch_size: a rollout batch has one update, in "
            "which S is 0 and nothing is ever clipped. Set it to a smaller divisor of the batch"
        )


def idle_penalty(config: DictConfig) -> str | None:
    """A note on a penalty of repeated tokens, which verl 0.9.1 hands to no request; None without one."""
    penalty = config.actor_rollout_ref.rollout.get("repetition_penalty")
    if penalty in (None, 1):
        return None
    return f"{_ROLLOUT}.repetition_penalty={penalty} does nothing: verl 0.9.1 samples with 1.0 whatever it is"


def plain_problems(config: DictConfig) -> Iterator[str]:
    """Problems of a loss or a trainer of ours that plain verl would meet only in the first mini-batch, or never."""
    loss_mode = OmegaConf.select(config, f"{_POLICY_LOSS}.loss_mode", throw_on_resolution_failure=False)
    if not (_is_ours(config) or loss_mode in ALGORITHMS):
        return
    if wrong := list(kind_problems(config)):
        yield from wrong
        return
    yield from _rollout_problems(config)
    if _is_ours(config):
        import recipe.fspo.sqrt_rejection  # noqa: F401  (a rule that the trainer adds)

        if problems := list(_plain_trainer_problems(config)):
            yield from problems
            return
        config = copy.deepcopy(config)
        yield from _skipping_problems(config) if config.get("fspo") else ()
        complete_settings(config)
        yield from _ratio_problems(config)
        yield from _clip_problems(config)
        yield from loss_problems(config)
    if is_by_sequence(config):
        yield from _clip_ratio_problems(config)
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
    except InstantiationException as error:
        try:
            settings = resolve_settings(policy_loss) or ALGORITHMS[policy_loss.loss_mode]
        except ValueError as wrong:
            yield f"{_POLICY_LOSS}.{wrong}"
            return
        target = policy_loss.get("_target_")
        ours = f"; give {_POLICY_LOSS}._target_={_OUR_CLASS}" if target != _OUR_CLASS else ""
        yield f"{_POLICY_LOSS}._target_={target}: {_reason(error)}{ours}"
    if settings.needs_state and not _is_ours(config):
        yield unmeasured(policy_loss.loss_mode, settings)


def _plain_trainer_problems(config: DictConfig) -> Iterator[str]:
    """Settings ``fspo.*`` that a command has added to verl's, and what else a trainer of this recipe needs there."""
    if not OmegaConf.is_dict(config.get("fspo") or OmegaConf.create()):
        yield f"fspo={config.fspo}: {is_group('fspo')}"
        return
    if not config.trainer.use_v1:
        yield f"trainer.use_v1=false reads no trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: leave it out"
    known = [field.name for field in dataclasses.fields(FspoSettings)]
    settings = config.get("fspo") or {}
    for name in settings:
        if name not in known:
            yield f"fspo.{name} does not exist; there are {', '.join(known)}"
    yield from type_problems(OmegaConf.to_container(OmegaConf.create(settings)), types_of(FspoSettings), "fspo.")
    folder = Path(config.trainer.default_local_dir)
    if problem := folder_problem(folder):
        yield f"trainer.default_local_dir={folder}: {problem}"
        return
    begins = config.trainer.resume_mode == "disable" or not (folder / TRACKER_FILE).exists()
    if begins and config.trainer.resume_mode != "resume_path" and holds_table(folder / FOLDER):
        yield (
            f"trainer.default_local_dir={folder} holds {FOLDER}/ of a training that saved no checkpoint, or is not "
            "resumed: move it away, or give another trainer.experiment_name"
        )
    actor = config.actor_rollout_ref.actor
    if settings.get("clip_values") == "measured" and not can_be_measured(actor.policy_loss):
        yield (
            f"fspo.clip_values=measured: loss_mode={actor.policy_loss.loss_mode} has none that could be measured: "
            f"leave it out, or give {_POLICY_LOSS}.loss_mode=fspo"
        )


def _by_rollout(config: DictConfig) -> bool:
    """Whether pi_old is the rollout engine's policy."""
    return bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode"))


def _ratio_problems(config: DictConfig) -> Iterator[str]:
    """Settings that make S or the importance ratios wrong, whoever trains."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.get("rollout_correction") or {}
    corrects = correction.get("rollout_is") is not None or correction.get("rollout_rs") is not None
    by_rollout = _by_rollout(config)
    needs = "algorithm.rollout_correction.bypass_mode=true" if by_rollout else "algorithm.rollout_correction"
    truncated = [
        f"{_ROLLOUT}.{name}={rollout[name]}" for name, off in (("top_p", 1), ("top_k", -1)) if rollout[name] != off
    ]
    if (corrects or by_rollout) and not rollout.calculate_log_probs:
        yield f"{_ROLLOUT}.calculate_log_probs=false: {needs} needs vLLM's log-probabilities; set it to true"
    # Truncated sampling: the log-probabilities are those of another distribution (trl#6789).
    if truncated:
        yield (
            f"{', '.join(truncated)} cuts the sampling distribution, so importance ratios are biased: set top_p=1 and "
            "top_k=-1 (val_kwargs has its own)"
        )


def _rollout_problems(config: DictConfig) -> Iterator[str]:
    """Settings with which responses are sampled from other weights or probabilities than the trainer's, or never used.

    Of both commands, and with a trainer of verl's, too.
    """
    model, rollout, trainer = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.trainer
    separate = trainer.use_v1 and str(trainer.v1.trainer_mode).endswith("separate_async")
    lora = next((name for name in ("lora_adapter_path", "lora_rank") if model.get(name)), None)
    if separate and lora and not OmegaConf.select(model, "lora.merge"):
        # verl#7495: its transfer to other devices leaves the adapter out, so they sample from the start for ever.
        yield (
            f"actor_rollout_ref.model.{lora}={model[lora]} does not reach the devices that generate in separate_async, "
            "because verl 0.9.1 sends them the weights without the adapter: set actor_rollout_ref.model.lora.merge="
            "true, or train with mode=colocate_async (in verl's own command trainer.v1.trainer_mode="
            "fspo_colocate_async)"
        )
    oldest = OmegaConf.select(trainer, "v1.sampler.max_off_policy_threshold")
    if isinstance(oldest, int) and oldest < 1:
        yield (
            f"trainer.v1.sampler.max_off_policy_threshold={oldest} leaves no response to train on: 1 is one that was "
            "asked for in this step. Set it to 1 or more, or to null for no limit"
        )
    if 0 < rollout.temperature < _LOWEST_TEMPERATURE:
        yield (
            f"{_ROLLOUT}.temperature={rollout.temperature} is not what vLLM samples at: its lowest is "
            f"{_LOWEST_TEMPERATURE}, and the trainer would divide the logits by yours. Set it to {_LOWEST_TEMPERATURE} "
            "or more (val_kwargs has its own)"
        )
    if str(rollout.get("logprobs_mode")).startswith("raw_") and rollout.temperature != 1:
        yield (
            f"{_ROLLOUT}.logprobs_mode={rollout.logprobs_mode} is before the temperature, and the trainer's are with "
            f"temperature={rollout.temperature}: set logprobs_mode to processed_logprobs"
        )


def _setting_problems(config: DictConfig) -> Iterator[str]:
    """Settings that contradict each other in a run, or make L wrong."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mode = config.trainer.v1.trainer_mode
    ours = f"mode={mode}" if f"fspo_{mode}" in TRAINER_MODES else "mode=sync, colocate_async or separate_async"
    unit = "max_token_len" if actor.use_dynamic_bsz else "micro_batch_size"
    new, old = f"ppo_{unit}_per_gpu", f"log_prob_{unit}_per_gpu"
    mini_batch = actor.ppo_mini_batch_size
    for wrong, setting, why in (
        (
            not config.fspo.get("algo"),
            "fspo.algo",
            "is missing, and reports group runs by it: give algo=NAME, or +fspo.algo=NAME beside ~algo; a file of "
            "yours in algo/ has fspo: {algo: NAME}",
        ),
        (
            mode not in TRAINER_MODES,
            f"trainer.v1.trainer_mode={mode}",
            "is a trainer of verl's that would leave the run folder empty, without metrics, checks or resume: leave it "
            f"out, and give {ours}, or train with plain verl, which knows the losses too (python -m "
            "verl.trainer.main_ppo)",
        ),
        # 1e-3 per token of spurious drift dwarfs a band of 3e-4 (verl#6280).
        (
            is_by_sequence(config) and actor[new] != rollout[old],
            f"{_ACTOR}.{new}={actor[new]}",
            f"differs from {_ROLLOUT}.{old}={rollout[old]}: old and new log-probabilities would be rounded "
            "differently; set them equal",
        ),
        (
            mode == "fspo" and not _by_rollout(config) and not config.evaluate and _never_clips(config),
            f"{_ACTOR}.ppo_mini_batch_size={mini_batch}",
            f"is data.train_batch_size={config.data.train_batch_size}: a rollout batch has one update, in which S is 0 "
            "and nothing is ever clipped. Set it to a smaller divisor of the batch, or take algo=unclipped",
        ),
    ):
        if wrong:
            yield f"{setting} {why}"


def _skipping_problems(config: DictConfig) -> Iterator[str]:
    """Responses without a gradient that are to be left out where they count."""
    if config.fspo.get("skip_zero_advantage") and (why := counts_zero_advantages(config)):
        yield f"fspo.skip_zero_advantage=true would change the gradient: {why}. Leave it out, or set it to false"


def _correction_problems(config: DictConfig) -> Iterator[str]:
    """A rollout correction that replaces the loss, or acts on tokens of which the loss has none."""
    correction = config.algorithm.get("rollout_correction") or {}
    weights, rules = correction.get("rollout_is"), correction.get("rollout_rs")
    by_token = "token_" in str(rules)
    for key, wrong, why in (
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
            f"algorithm.adv_estimator={estimator} compares the responses to one prompt, but {_ROLLOUT}.n={n}: set "
            f"{_ROLLOUT}.n=2 or more"
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
        clips = min(settings.c_low, settings.c_high) < NO_CLIP
        if clips and config.fspo.get("clip_values") == "measured" and (own := clip_values_of(config)):
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


def _clip_ratio_problems(config: DictConfig) -> Iterator[str]:
    """Clip values of verl's losses beside a loss that does not read them."""
    actor = config.actor_rollout_ref.actor
    for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        if is_by_sequence(config) and actor.get(key) not in (None, _VERLS_CLIP_RATIO):
            yield (
                f"{_ACTOR}.{key}={actor[key]} has no effect on loss_mode={actor.policy_loss.loss_mode}: give "
                f"{_POLICY_LOSS}.c_low and c_high, the band in nats, which a run measures (docs/algorithms.md), or a "
                "loss that reads it, such as algo=grpo"
            )


def _reward_problems(config: DictConfig) -> Iterator[str]:
    """Settings of a reward that nothing reads, so that the run trains on another one in silence."""
    reward = config.reward
    settings, own = dict(reward.get("reward_kwargs") or {}), str(reward.custom_reward_function.path)
    if (settings.get("overlong_buffer_cfg") or {}).get("enable") is False:
        settings = {key: value for key, value in settings.items() if key not in ("overlong_buffer_cfg", "max_resp_len")}
    module = OmegaConf.select(reward, "reward_manager.module.path")
    if settings and reward.reward_manager.source == "importlib" and module == "pkg://recipe.runner.reward_manager":
        keys, where = ", ".join(f"reward.reward_kwargs.{key}" for key in settings), "reward.custom_reward_function"
        yield (
            f"{keys}: this recipe's reward manager reads none of them; leave them out. A penalty for length is "
            f"+{where}.reward_kwargs.overlong_buffer=TOKENS +{where}.reward_kwargs.max_response_length=TOKENS "
            "(docs/data.md)"
        )
    model = reward.reward_model
    if model.enable and not model.model_path:
        yield "reward.reward_model.enable=true without a model: give reward.reward_model.model_path, or leave it out"
    elif model.enable and own == "pkg://recipe.math.reward":  # it would be started and never asked
        yield (
            "reward.reward_model.enable=true: the recipe's reward function asks no model; give "
            "reward.custom_reward_function.path=null, or a function that asks it"
        )


#: The table.
RULES: Final[tuple[Rule, ...]] = (
    _class_problems,  # first, because it imports the module of an own loss, which may register more than a loss
    _setting_problems,
    _ratio_problems,
    _rollout_problems,
    _correction_problems,
    _advantage_problems,
    _clip_problems,
    _clip_ratio_problems,
    _reward_problems,
    _skipping_problems,
)
