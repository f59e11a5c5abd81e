"""What is wrong with a command that trains, in this recipe's command and in verl's own: :func:`problems`.

Each rule stands for a mistake that trains wrong numbers in silence, or costs a loaded model and a rollout batch. Where
a rule has a public reference, the comment gives it (verl#N: issue or pull request N of verl).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omegaconf import DictConfig, OmegaConf
from recipe.fspo.config import (
    ACTOR,
    GROUP_ESTIMATORS,
    POLICY_LOSS,
    FspoSettings,
    counts_zero_advantages,
    is_ours,
    policy_loss_settings,
)
from recipe.fspo.sqrt_rejection import RULE  # and adds it to verl's
from recipe.runner.checkpoints.integrity import TRACKER_FILE
from recipe.runner.launch.check_values import value_problems
from recipe.runner.launch.settings import leaves
from recipe.runner.launch.trials import loss_problem

from fspo.clip_value import ACCEPT
from fspo.losses import LOSSES
from fspo.measured import ClipMeasurement
from fspo.table import FOLDER, holds_table
from fspo.types import NO_CLIP, SequenceLossSettings, eps_of_c
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
    """All problems of a configuration of verl's own command that is not completed yet, a sentence each.

    Values of a wrong type come alone, because the rules do arithmetic with values.
    """
    wrong = list(value_problems(config, {"fspo": FspoSettings}))
    return wrong or [*method_problems(config), *_table_problems(config.trainer, is_ours(config))]


def method_problems(config: DictConfig) -> list[str]:
    """What of it is said in both commands, of values that have the right types."""
    try:
        settings = policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
        ClipMeasurement(settings or SequenceLossSettings(), OmegaConf.select(config, "fspo.accept", default=ACCEPT))
    except ValueError as error:  # the other rules ask for the loss
        return [str(error)]
    loss = filter(None, [loss_problem(config)])
    return [*loss, *_loss_problems(config, settings), *_ratio_problems(config, settings), *_unread_problems(config)]


def notes(config: DictConfig) -> Iterator[str]:
    """What a right command should know; of a configuration that is not completed yet."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    correction = config.algorithm.get("rollout_correction") or {}
    bypass = bool(correction.get("bypass_mode"))
    corrects = correction.get("rollout_is") is not None or correction.get("rollout_rs") is not None
    mode = str(trainer.v1.trainer_mode) if trainer.use_v1 else "sync"
    if mode.endswith("_async") and not (corrects or bypass):
        yield (
            f"{_CORRECTION}.rollout_rs=null keeps responses however old their weights are, and S is measured from "
            "newer ones: rollout_rs=seq_sqrt_k1 leaves them out (docs/async.md)"
        )
    settings, updates = policy_loss_settings(actor.policy_loss), actor.ppo_epochs * config.data.train_batch_size
    clips = settings is not None and (settings.needs_state or min(settings.c_low, settings.c_high) < NO_CLIP)
    # separate_async trains several batches between two transfers of the weights, and S starts from the first.
    is_first = not (bypass or mode.endswith("separate_async")) and updates <= actor.ppo_mini_batch_size
    if clips and is_first and not config.get("evaluate"):
        yield (
            f"{ACTOR}.ppo_mini_batch_size={actor.ppo_mini_batch_size} is data.train_batch_size: a rollout batch has "
            "one update, in which S is 0 and nothing is ever clipped. Set it to a smaller divisor of the batch"
        )
    penalty = config.actor_rollout_ref.rollout.get("repetition_penalty")
    if penalty not in (None, 1):
        yield f"{ROLLOUT}.repetition_penalty={penalty} does nothing: verl 0.9.1 samples with 1.0 whatever it is"


def _loss_problems(config: DictConfig, settings: SequenceLossSettings | None) -> Iterator[str]:
    """A loss that nobody measures; clip values that it does not read, or of another loss."""
    actor, length = config.actor_rollout_ref.actor, config.data.max_response_length
    loss_mode = actor.policy_loss.loss_mode
    values: dict[str, tuple[float | None, float]] = {}
    if settings is not None:
        if settings.needs_state and not is_ours(config):
            yield unmeasured(loss_mode, settings)
        for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            if actor.get(key) not in (None, _VERLS_CLIP_RATIO):
                yield (
                    f"{ACTOR}.{key}={actor[key]} has no effect on loss_mode={loss_mode}: give {POLICY_LOSS}.c_low and "
                    "c_high, the band in nats (docs/algorithms.md), or a loss that reads it, such as algo=grpo"
                )
        loss = LOSSES[loss_mode]
        growth = float(length) ** (loss.settings.exponent - settings.exponent)
        for key in ("c_low", "c_high"):
            values[f"{POLICY_LOSS}.{key}"] = (getattr(settings, key), getattr(loss.settings, key) * growth)
    elif loss_mode == "gspo":
        loss = LOSSES["seq_gspo"]
        usual = eps_of_c(loss.settings.c_low, loss.settings.c_high)
        for key, eps in zip(("clip_ratio_low", "clip_ratio_high"), usual, strict=True):
            read = "clip_ratio" if actor[key] is None else key
            values[f"{ACTOR}.{read}"] = (actor[read], eps)
    for key, (value, usual_value) in values.items():
        if value is not None and value < NO_CLIP and not 1 / _FACTOR <= value / usual_value <= _FACTOR:
            effect = "clip nearly every sequence" if value < usual_value else "never clip"
            yield (
                f"{key}={value} would {effect}: at {length} tokens {usual_value:.3g} is as wide as {loss.source} "
                "(docs/algorithms.md)"
            )
    if OmegaConf.select(config, "fspo.skip_zero_advantage") and (why := counts_zero_advantages(config)):
        yield f"fspo.skip_zero_advantage=true would change the gradient: {why}. Leave it out, or set it to false"


def _ratio_problems(config: DictConfig, settings: SequenceLossSettings | None) -> Iterator[str]:
    """Advantages and ratios that are not what the loss takes them for, or not of what was sampled."""
    actor, rollout, algorithm = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.algorithm
    estimator, by_sequence = str(algorithm.adv_estimator), settings is not None
    discounts = algorithm.gamma != 1 or algorithm.use_kl_in_reward
    by_token = estimator in _TOKEN_ESTIMATORS or (estimator == "reinforce_plus_plus" and discounts)
    correction = algorithm.get("rollout_correction") or {}
    weights, rules = correction.get("rollout_is"), correction.get("rollout_rs")
    uses = weights is not None or rules is not None or bool(correction.get("bypass_mode"))
    off = {"top_p": 1, "top_k": -1}
    logprobs_mode = rollout.get("logprobs_mode") or "raw_logprobs"  # which is vLLM's own default
    truncated = [f"{ROLLOUT}.{name}={rollout[name]}" for name, value in off.items() if rollout[name] != value]
    oldest = OmegaConf.select(config, "trainer.v1.sampler.max_off_policy_threshold")
    unit = "max_token_len" if actor.use_dynamic_bsz else "micro_batch_size"
    new, old = f"ppo_{unit}_per_gpu", f"log_prob_{unit}_per_gpu"
    for wrong, sentence in (
        (
            estimator in GROUP_ESTIMATORS and rollout.n < 2,
            f"algorithm.adv_estimator={estimator} compares the responses to one prompt, but {ROLLOUT}.n={rollout.n}: "
            f"set {ROLLOUT}.n=2 or more",
        ),
        (
            RULE in str(rules) and rules != RULE,
            f"{_CORRECTION}.rollout_rs={rules}: {RULE} stands alone, because verl knows no list of rules with it",
        ),
        (
            by_token and by_sequence,
            f"algorithm.adv_estimator={estimator} with algorithm.gamma={algorithm.gamma} and "
            f"use_kl_in_reward={algorithm.use_kl_in_reward} gives an advantage per token, and a sequence-level loss "
            "needs one per response: set it to grpo or rloo, or use a token-level loss (algo=grpo)",
        ),
        (
            by_sequence and weights not in (None, "sequence"),
            f"{_CORRECTION}.rollout_is={weights} is one weight per token: set it to sequence or null (docs/async.md)",
        ),
        (
            by_sequence and "token_" in str(rules),
            f"{_CORRECTION}.rollout_rs={rules} removes tokens, and S and L would be those of the rest: take seq_... "
            "(docs/async.md)",
        ),
        (
            uses and not rollout.calculate_log_probs,
            f"{ROLLOUT}.calculate_log_probs=false: {_CORRECTION} (rollout_is, rollout_rs or bypass_mode) needs vLLM's "
            "log-probabilities; set it to true",
        ),
        (  # The log-probabilities are those of another distribution (trl#6789).
            truncated,
            f"{', '.join(truncated)} cuts the sampling distribution, so importance ratios are biased: set top_p=1 and "
            "top_k=-1 (val_kwargs has its own)",
        ),
        (
            isinstance(oldest, int) and oldest < 1,
            f"trainer.v1.sampler.max_off_policy_threshold={oldest} leaves no response to train on: 1 is one that was "
            "asked for in this step. Set it to 1 or more, or to null for no limit",
        ),
        (
            0 <= rollout.temperature < _LOWEST_TEMPERATURE,
            f"{ROLLOUT}.temperature={rollout.temperature} is not what vLLM samples at: its lowest is "
            f"{_LOWEST_TEMPERATURE}, and the trainer would divide the logits by yours. Set it to {_LOWEST_TEMPERATURE} "
            "or more (val_kwargs has its own)",
        ),
        (
            "logits" in logprobs_mode or (logprobs_mode == "raw_logprobs" and rollout.temperature != 1),
            f"{ROLLOUT}.logprobs_mode={logprobs_mode} gives no log-probabilities with temperature="
            f"{rollout.temperature}, as the trainer has them: set it to processed_logprobs",
        ),
        (  # Different packs: 1e-3 per token of spurious drift dwarfs a band of 3e-4 (verl#6280).
            by_sequence and actor[new] != rollout[old],
            f"{ACTOR}.{new}={actor[new]} differs from {ROLLOUT}.{old}={rollout[old]}: old and new log-probabilities "
            "would be rounded differently; set them equal",
        ),
    ):
        if wrong:
            yield sentence


def _unread_problems(config: DictConfig) -> Iterator[str]:
    """A trainer, an adapter, a reward's settings, a reward model or tools that the command names and nothing uses."""
    model, trainer = config.actor_rollout_ref.model, config.trainer
    if is_ours(config) and not trainer.use_v1:
        yield f"trainer.use_v1=false is verl's older trainer, and not {trainer.v1.trainer_mode}: leave it out"
    separate = trainer.use_v1 and str(trainer.v1.trainer_mode).endswith("separate_async")
    lora = next((name for name in ("lora_adapter_path", "lora_rank") if model.get(name)), None)
    if separate and lora and not OmegaConf.select(model, "lora.merge"):  # verl#7495
        yield (
            f"actor_rollout_ref.model.{lora}={model[lora]} does not reach the devices that generate in separate_async: "
            "set actor_rollout_ref.model.lora.merge=true, or train with mode=colocate_async (in verl's own command "
            "trainer.v1.trainer_mode=fspo_colocate_async)"
        )
    old = {group: OmegaConf.to_container(config[group]) for group in _OLD_REWARD_GROUPS if config.get(group)}
    for key, value in leaves(old):
        if value is not None:
            yield f"{key}={value}: nothing in verl 0.9.1 reads it; give it below reward. (docs/data.md)"
    yield from _reward_problems(config.reward)
    yield from _tool_problems(config.actor_rollout_ref.rollout, config.data)


def _reward_problems(reward: DictConfig) -> Iterator[str]:
    """Settings of a reward that nothing reads, so that the run trains on another one in silence."""
    settings, own = dict(reward.get("reward_kwargs") or {}), "reward.custom_reward_function"
    if (settings.get("overlong_buffer_cfg") or {}).get("enable") is False:
        settings = {key: value for key, value in settings.items() if key not in ("overlong_buffer_cfg", "max_resp_len")}
    module = OmegaConf.select(reward, "reward_manager.module.path")
    if settings and reward.reward_manager.source == "importlib" and module == "pkg://recipe.runner.reward_manager":
        keys = ", ".join(f"reward.reward_kwargs.{key}" for key in settings)
        yield (
            f"{keys}: this recipe's reward manager reads none of them; leave them out. A penalty for length is "
            f"+{own}.reward_kwargs.overlong_buffer=TOKENS +{own}.reward_kwargs.max_response_length=TOKENS "
            "(docs/data.md)"
        )
    model = reward.reward_model
    if model.enable and not model.model_path:
        yield "reward.reward_model.enable=true without a model: give reward.reward_model.model_path, or leave it out"
    elif model.enable and reward.custom_reward_function.path == "pkg://recipe.math.reward":
        yield (  # it would be started and never asked
            f"reward.reward_model.enable=true: the recipe's reward function asks no model; give {own}.path=null, or a "
            "function that asks it"
        )


def _tool_problems(rollout: DictConfig, data: DictConfig) -> Iterator[str]:
    """Tools where every response has one turn, in which none is called."""
    keys = ("multi_turn.tool_config_path", "multi_turn.function_tool_path")
    given = [f"{key}={value}" for key in keys if (value := OmegaConf.select(rollout, key))]
    one_turn = OmegaConf.select(rollout, "agent.default_agent_loop") == "single_turn_agent"
    own = OmegaConf.select(rollout, "agent.agent_loop_manager_class") or OmegaConf.select(data, "custom_cls.path")
    if not (given and one_turn) or own:
        return
    from recipe.runner.launch.check_data import read_some
    from recipe.runner.launch.settings import DATA, files_of

    try:
        named = any("agent_name" in read_some(file, 1)[0] for name in DATA for file in files_of(data, name))
    except (OSError, ValueError):  # a file cannot be read here
        named = not data.get("offline_task")
    if not named:
        yield (
            f"{ROLLOUT}.{given[0]}: every response has one turn, in which no tool is called; give "
            f"{ROLLOUT}.agent.default_agent_loop=tool_agent, or a column agent_name in the data"
        )


def _table_problems(trainer: DictConfig, is_ours: bool) -> Iterator[str]:
    """Two trainings in one table; recipe.fspo.main starts such a run again."""
    folder = Path(str(trainer.default_local_dir))
    resumes = trainer.resume_mode != "disable" and (folder / TRACKER_FILE).exists()
    if is_ours and not resumes and trainer.resume_mode != "resume_path" and holds_table(folder / FOLDER):
        yield (
            f"trainer.default_local_dir={folder} holds {FOLDER}/ of a training that saved no checkpoint, or is not "
            "resumed: move it away, or give another folder"
        )
