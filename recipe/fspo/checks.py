"""What is wrong with a command that trains, in this recipe's command and in verl's own: :func:`problems`.

Each rule stands for a mistake that trains wrong numbers in silence, or costs a loaded model and a rollout batch. Where
a rule has a public reference, the comment gives it (verl#N: issue or pull request N of verl).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf
from recipe.fspo.config import (
    ACTOR,
    GROUP_ESTIMATORS,
    POLICY_LOSS,
    FspoSettings,
    counts_zero_advantages,
    is_by_sequence,
    is_ours,
    policy_loss_settings,
)
from recipe.runner.checkpoints.integrity import TRACKER_FILE
from recipe.runner.launch.check_update import loss_problem
from recipe.runner.launch.check_values import value_problems
from recipe.runner.launch.settings import leaves

from fspo.losses import LOSSES
from fspo.table import FOLDER, holds_table
from fspo.types import NO_CLIP, eps_of_c
from fspo.verl import unmeasured

ROLLOUT: Final = "actor_rollout_ref.rollout"
_CORRECTION: Final = "algorithm.rollout_correction"
#: Advantage estimators with a value per token.
_TOKEN_ESTIMATORS: Final = ("gae", "optimal_token_baseline", "tir_optimal_token_baseline")
#: A clip value so many times the published one, at the longest response, is that of another exponent or loss:
#: frameworks have shipped PPO's 0.2 in place of GSPO's 3e-4 by mistake. Measured ones were up to 34 times it.
_FACTOR: Final = 50.0
#: verl's default of ``clip_ratio`` and of both its sides.
_VERLS_CLIP_RATIO: Final = 0.2
#: vLLM samples at this temperature where a lower one is asked for, and the trainer divides the logits by that.
_LOWEST_TEMPERATURE: Final = 0.01
#: verl's reward groups of before 0.7: 0.9.1 reads none of them.
_OLD_REWARD_GROUPS: Final = ("custom_reward_function", "reward_model", "sandbox_fusion")


def problems(config: DictConfig) -> list[str]:
    """All problems of a configuration that is not completed yet, a sentence each; none where nothing of it is ours.

    Values of a wrong type come alone, because the rules do arithmetic with values.
    """
    if not (is_ours(config) or is_by_sequence(config)):
        return []
    wrong = list(value_problems(config, {"fspo": FspoSettings}))
    if not wrong and is_by_sequence(config):
        try:
            policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
        except ValueError as error:
            wrong.append(str(error))
    return wrong or [problem for rule in RULES for problem in rule(config)]


def notes(config: DictConfig) -> list[str]:
    """What a right command should know."""
    said = []
    correction = config.algorithm.get("rollout_correction") or {}
    bypass = _starts_from_the_rollout(config)
    corrects = correction.get("rollout_is") is not None or correction.get("rollout_rs") is not None
    mode = str(config.trainer.v1.trainer_mode) if config.trainer.use_v1 else "sync"
    if mode.endswith("_async") and not (corrects or bypass):
        said.append(
            f"{_CORRECTION}.rollout_rs=null keeps responses however old their weights are, and S is measured from "
            "newer ones: rollout_rs=seq_sqrt_k1 leaves them out (docs/async.md)"
        )
    if bypass and corrects:
        said.append(f"{_CORRECTION}.rollout_is and rollout_rs have no effect: with bypass_mode=true verl takes neither")
    # separate_async trains several batches between two transfers of the weights, and S starts from the first.
    if not mode.endswith("separate_async") and not bypass and _never_clips(config):
        mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
        said.append(
            f"{ACTOR}.ppo_mini_batch_size={mini_batch} is data.train_batch_size: a rollout batch has one update, in "
            "which S is 0 and nothing is ever clipped. Set it to a smaller divisor of the batch"
        )
    penalty = config.actor_rollout_ref.rollout.get("repetition_penalty")
    if penalty not in (None, 1):
        said.append(f"{ROLLOUT}.repetition_penalty={penalty} does nothing: verl 0.9.1 samples with 1.0 whatever it is")
    return said


def _starts_from_the_rollout(config: DictConfig) -> bool:
    """Whether pi_old is the policy of the rollout engine: verl's V1 trainers copy its log-probabilities."""
    return bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode"))


def _never_clips(config: DictConfig) -> bool:
    """Whether each rollout batch has one update only, in which S is 0, so that a band that could clip never does."""
    actor = config.actor_rollout_ref.actor
    if config.get("evaluate") or actor.ppo_epochs * config.data.train_batch_size > actor.ppo_mini_batch_size:
        return False
    settings = policy_loss_settings(actor.policy_loss)
    return settings is not None and (settings.needs_state or min(settings.c_low, settings.c_high) < NO_CLIP)


# ---------------------------------------------------------------- the loss


def _loss(config: DictConfig) -> Iterator[str]:
    """A loss that nobody registers or measures, its class, and clip values of verl's that it does not read."""
    actor, policy_loss = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    if problem := loss_problem(config):
        yield problem
    if not is_by_sequence(config):
        return
    settings = policy_loss_settings(policy_loss)
    if settings is not None and settings.needs_state and not is_ours(config):
        yield unmeasured(policy_loss.loss_mode, settings)
    for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        if actor.get(key) not in (None, _VERLS_CLIP_RATIO):
            yield (
                f"{ACTOR}.{key}={actor[key]} has no effect on loss_mode={policy_loss.loss_mode}: give "
                f"{POLICY_LOSS}.c_low and c_high, the band in nats (docs/algorithms.md), or a loss that reads it, such "
                "as algo=grpo"
            )


def _clip_values(config: DictConfig) -> Iterator[str]:
    """Clip values that are those of another exponent, or of another loss."""
    actor, length = config.actor_rollout_ref.actor, config.data.max_response_length
    loss_mode, settings = actor.policy_loss.loss_mode, policy_loss_settings(actor.policy_loss)
    values: dict[str, tuple[float | None, float]] = {}
    if loss_mode == "gspo":
        loss = LOSSES["seq_gspo"]
        usual = eps_of_c(loss.settings.c_low, loss.settings.c_high)
        keys = ("clip_ratio_low", "clip_ratio_high")
        values = {f"{ACTOR}.{key}": (actor[key], eps) for key, eps in zip(keys, usual, strict=True)}
    elif settings is not None:
        loss = LOSSES[loss_mode]
        growth = float(length) ** (loss.settings.exponent - settings.exponent)
        values = {
            f"{POLICY_LOSS}.{key}": (getattr(settings, key), getattr(loss.settings, key) * growth)
            for key in ("c_low", "c_high")
        }
    for key, (value, usual_value) in values.items():
        if value and value < NO_CLIP and not 1 / _FACTOR <= value / usual_value <= _FACTOR:
            effect = "clip nearly every sequence" if value < usual_value else "never clip"
            yield (
                f"{key}={value} would {effect}: at {length} tokens {usual_value:.3g} is as wide as {loss.source} "
                "(docs/algorithms.md)"
            )


def _skipping(config: DictConfig) -> Iterator[str]:
    """Responses without a gradient that are to be left out where they count."""
    if OmegaConf.select(config, "fspo.skip_zero_advantage") and (why := counts_zero_advantages(config)):
        yield f"fspo.skip_zero_advantage=true would change the gradient: {why}. Leave it out, or set it to false"


# ---------------------------------------------------------------- advantages, corrections, ratios


def _advantages(config: DictConfig) -> Iterator[str]:
    """Groups of one response, and advantages that differ within a response."""
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    estimator = str(algorithm.adv_estimator)
    if estimator in GROUP_ESTIMATORS and n < 2:
        yield (
            f"algorithm.adv_estimator={estimator} compares the responses to one prompt, but {ROLLOUT}.n={n}: set "
            f"{ROLLOUT}.n=2 or more"
        )
    discounts = algorithm.gamma != 1 or algorithm.use_kl_in_reward
    by_token = estimator in _TOKEN_ESTIMATORS or (estimator == "reinforce_plus_plus" and discounts)
    if by_token and is_by_sequence(config):
        yield (
            f"algorithm.adv_estimator={estimator} with algorithm.gamma={algorithm.gamma} and "
            f"use_kl_in_reward={algorithm.use_kl_in_reward} gives an advantage per token, and a sequence-level loss "
            "needs one per response: set it to grpo or rloo, or use a token-level loss (algo=grpo)"
        )


def _corrections(config: DictConfig) -> Iterator[str]:
    """Corrections of single tokens, and log-probabilities of vLLM that nobody asks it for."""
    correction = config.algorithm.get("rollout_correction") or {}
    weights, rules = correction.get("rollout_is"), correction.get("rollout_rs")
    if "seq_sqrt" in str(rules):
        import recipe.fspo.sqrt_rejection  # noqa: F401  (which is one of this recipe's)
    for key, wrong, why in (
        ("rollout_is", weights not in (None, "sequence"), "is one weight per token: set it to sequence or null"),
        ("rollout_rs", "token_" in str(rules), "removes tokens, and S and L would be those of the rest: take seq_..."),
    ):
        if wrong and is_by_sequence(config):
            yield f"{_CORRECTION}.{key}={correction[key]} {why} (docs/async.md)"
    uses = weights is not None or rules is not None or _starts_from_the_rollout(config)
    if uses and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield (
            f"{ROLLOUT}.calculate_log_probs=false: {_CORRECTION} (rollout_is, rollout_rs or bypass_mode) needs vLLM's "
            "log-probabilities; set it to true"
        )


def _sampling(config: DictConfig) -> Iterator[str]:
    """What is sampled is not what the ratios are of."""
    rollout = config.actor_rollout_ref.rollout
    # Truncated sampling: the log-probabilities are those of another distribution (trl#6789).
    if truncated := [
        f"{ROLLOUT}.{name}={rollout[name]}" for name, off in (("top_p", 1), ("top_k", -1)) if rollout[name] != off
    ]:
        yield (
            f"{', '.join(truncated)} cuts the sampling distribution, so importance ratios are biased: set top_p=1 and "
            "top_k=-1 (val_kwargs has its own)"
        )
    oldest = OmegaConf.select(config, "trainer.v1.sampler.max_off_policy_threshold")
    if isinstance(oldest, int) and oldest < 1:
        yield (
            f"trainer.v1.sampler.max_off_policy_threshold={oldest} leaves no response to train on: 1 is one that was "
            "asked for in this step. Set it to 1 or more, or to null for no limit"
        )
    if 0 <= rollout.temperature < _LOWEST_TEMPERATURE:
        yield (
            f"{ROLLOUT}.temperature={rollout.temperature} is not what vLLM samples at: its lowest is "
            f"{_LOWEST_TEMPERATURE}, and the trainer would divide the logits by yours. Set it to {_LOWEST_TEMPERATURE} "
            "or more (val_kwargs has its own)"
        )
    if str(rollout.get("logprobs_mode")).startswith("raw_") and rollout.temperature != 1:
        yield (
            f"{ROLLOUT}.logprobs_mode={rollout.logprobs_mode} is before the temperature, and the trainer's are with "
            f"temperature={rollout.temperature}: set logprobs_mode to processed_logprobs"
        )


def _rounding(config: DictConfig) -> Iterator[str]:
    """Different packs: 1e-3 per token of spurious drift dwarfs a band of 3e-4 (verl#6280)."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    unit = "max_token_len" if actor.use_dynamic_bsz else "micro_batch_size"
    new, old = f"ppo_{unit}_per_gpu", f"log_prob_{unit}_per_gpu"
    if is_by_sequence(config) and actor[new] != rollout[old]:
        yield (
            f"{ACTOR}.{new}={actor[new]} differs from {ROLLOUT}.{old}={rollout[old]}: old and new log-probabilities "
            "would be rounded differently; set them equal"
        )


# ---------------------------------------------------------------- weights, rewards, tools, the folder


def _lora(config: DictConfig) -> Iterator[str]:
    """A LoRA in separate_async, verl#7495: its transfer to other devices leaves the adapter out."""
    model, trainer = config.actor_rollout_ref.model, config.trainer
    separate = trainer.use_v1 and str(trainer.v1.trainer_mode).endswith("separate_async")
    lora = next((name for name in ("lora_adapter_path", "lora_rank") if model.get(name)), None)
    if separate and lora and not OmegaConf.select(model, "lora.merge"):
        yield (
            f"actor_rollout_ref.model.{lora}={model[lora]} does not reach the devices that generate in separate_async: "
            "set actor_rollout_ref.model.lora.merge=true, or train with mode=colocate_async (in verl's own command "
            "trainer.v1.trainer_mode=fspo_colocate_async)"
        )


def _rewards(config: DictConfig) -> Iterator[str]:
    """Settings of a reward that nothing reads, so that the run trains on another one in silence."""
    for group in _OLD_REWARD_GROUPS:
        for key, value in leaves(OmegaConf.to_container(config.get(group) or OmegaConf.create()), group):
            if value is not None:
                yield f"{key}={value}: nothing in verl 0.9.1 reads it; give it below reward. (docs/data.md)"
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


def _tools(config: DictConfig) -> Iterator[str]:
    """Tools where every response has one turn, in which none is called."""
    agent = f"{ROLLOUT}.agent"
    keys = [f"{ROLLOUT}.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path")]
    given = [key for key in keys if OmegaConf.select(config, key)]
    if (
        given
        and OmegaConf.select(config, f"{agent}.default_agent_loop") == "single_turn_agent"
        and not any(
            OmegaConf.select(config, key) for key in (f"{agent}.agent_loop_manager_class", "data.custom_cls.path")
        )
        and not _rows_name_loops(config)
    ):
        yield (
            f"{given[0]}={OmegaConf.select(config, given[0])}: every response has one turn, in which no tool is "
            f"called; give {agent}.default_agent_loop=tool_agent, or a column agent_name in the data"
        )


def _rows_name_loops(config: DictConfig) -> bool:
    """Whether rows of the data name the agent loop that answers them; also if a file cannot be read here."""
    from recipe.runner.launch.check_data import column_names
    from recipe.runner.launch.settings import DATA, files_of

    try:
        return any("agent_name" in column_names(Path(file)) for key in DATA for file in files_of(config, key))
    except (OSError, ValueError):
        return not config.data.get("offline_task")


def _folder(config: DictConfig) -> Iterator[str]:
    """Two trainings in one table."""
    trainer = config.trainer
    folder = Path(str(trainer.default_local_dir))
    begins = trainer.resume_mode == "disable" or not (folder / TRACKER_FILE).exists()
    # recipe.fspo.main starts such a run again.
    begins &= is_ours(config) and "dry_run" not in config and trainer.resume_mode != "resume_path"
    if begins and holds_table(folder / FOLDER):
        yield (
            f"trainer.default_local_dir={folder} holds {FOLDER}/ of a training that saved no checkpoint, or is not "
            "resumed: move it away, or give another folder"
        )


RULES: Final[tuple[Callable[[DictConfig], Iterator[Any]], ...]] = (
    _loss,  # first, because it imports the module of an own loss, which may register more than a loss
    _clip_values,
    _skipping,
    _advantages,
    _corrections,
    _sampling,
    _rounding,
    _lora,
    _rewards,
    _tools,
    _folder,
)
