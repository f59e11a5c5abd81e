"""Keys that a command gives and that nothing reads, because of another setting.

:data:`ROWS` is the table; a job adds its own (:attr:`recipe.runner.launch.job.Job.without_effect`), and
docs/keys-without-effect.md shows both. A key counts that the user gave, on the command line or, in a resumed run, when
it began; a default or an experiment's value does not. What would change the training is refused, with the remedy. It is
only noted if the run does anyway what the key asks for: the value is the one that holds without it, it asks for
nothing, or the user gave the setting that disables it, too.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch import inputs
from recipe.runner.launch.compose import CONF_DIR, HANDED_ON, SEARCH_PATH, compose, parsed, select, verl_config_dir
from recipe.runner.launch.job import Becomes, Job, Row
from recipe.runner.verl_patches import server_slots

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_REF: Final = "actor_rollout_ref.ref"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_CORRECTION: Final = "algorithm.rollout_correction"
_FILTER: Final = "algorithm.filter_groups"
_REWARD_MODEL: Final = "reward.reward_model"
_ABSENT: Final = object()
_UNKNOWN: Final = "neither verl's code nor this recipe's has the name"


@dataclass(frozen=True)
class CommandKeys:
    """The keys that a command gives, those of a resumed run's first command among them.

    Attributes:
        config: The prepared configuration, before the run folder changes what the run begins with.
        job: The kind of run.
        overrides: Those that composed it.
        begun_with: The overrides with which the run has trained already.
    """

    config: DictConfig
    job: Job
    overrides: Sequence[str]
    begun_with: Sequence[str] = ()

    @cached_property
    def values(self) -> dict[str, Any]:
        """Key and value of every override, those of groups of the configuration left out."""
        keys = (str(override.key_or_group) for override in parsed(self.overrides))
        return dict(leaf for key in keys if "." in key for leaf in self._leaves_of(key))

    @cached_property
    def added(self) -> set[str]:
        """The keys that were added with a plus."""
        plus = (override for override in parsed(self.overrides) if override.is_add() or override.is_force_add())
        keys = (str(override.key_or_group) for override in plus)
        return {leaf for key in keys if "." in key for leaf, _ in self._leaves_of(key)}

    @cached_property
    def trained_with(self) -> set[str]:
        """The keys with which the run has trained already."""
        return {str(override.key_or_group) for override in parsed(self.begun_with)}

    def _leaves_of(self, key: str) -> Iterator[tuple[str, Any]]:
        return _leaves(key, select(self.config, key, _ABSENT))

    @cached_property
    def without(self) -> DictConfig:
        """The configuration with the groups that were chosen, and without the other overrides."""
        keys = {line: line.partition("=")[0] for line in self.overrides}
        return compose(self.job, [line for line, key in keys.items() if "." not in key or key == SEARCH_PATH])


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if OmegaConf.is_dict(value):
        for name in value:
            yield from _leaves(f"{key}.{name}", value[name])
    elif value is not _ABSENT:  # removed with ~
        yield key, value


def judged(command: CommandKeys, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """The sentences that refuse a run, and those that a person should read: one for all keys of a row."""
    config, sentences, judged_keys = command.config, dict[tuple[bool, Row], list[str]](), set[str]()
    for key, value in command.values.items():
        row = next((row for row in rows if key in row and row.disables(config)), None)
        if row is not None:
            judged_keys.add(key)
            is_note = row.becomes == "note" or (row.becomes == "refused" and row.switch in command.values)
            is_note = is_note or not row.asks(value) or key in command.trained_with
            is_note = is_note or value == select(command.without, key, None)
            sentences.setdefault((is_note, row), []).append(f"{key}={'null' if value is None else value}")
    texts = {
        at: f"{', '.join(keys)}: no effect{_because(at[1], config)}; {at[1].remedy}" for at, keys in sentences.items()
    }
    unknown = [f"{key}={command.values[key]}" for key in command.added - {*judged_keys} if _is_unknown(command, key)]
    refused, notes = ([text for (is_note, _), text in texts.items() if is_note == wanted] for wanted in (False, True))
    if unknown:
        notes.append(f"{', '.join(sorted(unknown))}: no effect unless code of yours reads it; {_UNKNOWN}")
    return refused, notes


def _is_unknown(command: CommandKeys, key: str) -> bool:
    """Whether an added key is new to the configuration, below no group that hands on what it holds, and in no code."""
    is_new = select(command.without, key, _ABSENT) is _ABSENT and not HANDED_ON.search(key)
    return is_new and not re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", _code())


@functools.cache
def _code() -> str:
    """All of verl's code, and that of the recipes."""
    folders = (verl_config_dir().parents[1], CONF_DIR.parents[1])
    # old_keys.py names keys that nothing reads.
    files = (file for folder in folders for file in folder.rglob("*.py") if file.name != "old_keys.py")
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _because(row: Row, config: DictConfig) -> str:
    value = OmegaConf.select(config, row.switch) if row.switch else None
    return f" with {row.switch}={'null' if value is None else value}" if row.switch else ""


# ---------------------------------------------------------------- what disables


def _is(key: str, *values: Any) -> Callable[[DictConfig], bool]:
    """Whether a setting has one of these values."""
    return lambda config: OmegaConf.select(config, key) in values


def _unless(key: str, *values: Any) -> Callable[[DictConfig], bool]:
    return lambda config: not _is(key, *values)(config)


def _off(keys: str, switch: str, values: Sequence[Any], remedy: str, becomes: Becomes = "note") -> Row:
    """A row whose switch disables with one of these values."""
    when = " or ".join("null" if value is None else str(value).lower() for value in values)
    return Row(tuple(keys.split()), switch, when, _is(switch, *values), remedy, becomes)


def _never(keys: str, remedy: str, becomes: Becomes = "note") -> Row:
    """A row of keys that nothing reads, whatever else is set."""
    return Row(tuple(keys.split()), "", "", lambda config: True, remedy, becomes)


def _no_critic(config: DictConfig) -> bool:
    enabled = config.critic.enable
    return not enabled if enabled is not None else str(config.algorithm.adv_estimator) != "gae"


def _epochs_do_not_end_it(config: DictConfig) -> bool:
    """Whether the last step comes first, or nobody can tell before the data are read."""
    last, by_epochs = config.trainer.total_training_steps, inputs.steps_of_epochs(config)
    return last is not None and (by_epochs is None or by_epochs >= last)


def _epochs_end_it(config: DictConfig) -> bool:
    last, by_epochs = config.trainer.total_training_steps, inputs.steps_of_epochs(config)
    return last is not None and by_epochs is not None and by_epochs < last


def _is_not_validated(config: DictConfig) -> bool:
    trainer = config.trainer
    return trainer.test_freq <= 0 and not trainer.val_before_train and not config.get("evaluate")


def _shows_no_texts(config: DictConfig) -> bool:
    """Whether none of the loggers can show generations."""
    logger = config.trainer.logger
    return {logger} if isinstance(logger, str) else {*logger} <= {"console", "file", "rl_insight"}


def _is_not_read_by(registered: Callable[[DictConfig], Any], name: str) -> Callable[[DictConfig], bool]:
    """Whether verl's code of the registered function does not have the name; of others nothing is known."""

    def disables(config: DictConfig) -> bool:
        function = registered(config)
        is_verls = function is not None and function.__module__.startswith("verl.")
        return is_verls and not re.search(rf"\b{name}\b", inspect.getsource(inspect.unwrap(function)))

    return disables


def _estimator(config: DictConfig) -> Any:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return ADV_ESTIMATOR_REGISTRY.get(str(config.algorithm.adv_estimator))


def _loss(config: DictConfig) -> Any:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return POLICY_LOSS_REGISTRY.get(config.actor_rollout_ref.actor.policy_loss.loss_mode)


def _of_loss(names: str, becomes: Becomes) -> Iterator[Row]:
    for name in names.split():
        remedy = "this loss of verl's does not read it"
        disables = _is_not_read_by(_loss, name.rpartition(".")[2])
        yield Row(
            (f"{_ACTOR}.{name}",), f"{_ACTOR}.policy_loss.loss_mode", "a loss without it", disables, remedy, becomes
        )


def _optimizer(group: str) -> Iterator[Row]:
    """The settings of an optimizer that its others switch off."""
    optimizer = f"{group}.optim"
    yield Row(
        (f"{optimizer}.lr_warmup_steps_ratio",),
        f"{optimizer}.lr_warmup_steps",
        "above 0",
        lambda config: OmegaConf.select(config, f"{optimizer}.lr_warmup_steps") > 0,
        f"give {optimizer}.lr_warmup_steps=-1 for a share of the run",
        "refused",
    )
    yield Row(
        tuple(f"{optimizer}.{name}" for name in ("min_lr_ratio", "num_cycles", "zero_indexed_step")),
        f"{optimizer}.lr_scheduler_type",
        "constant",
        lambda config: (
            _is(f"{optimizer}.lr_scheduler_type", "constant")(config)
            and _is(f"{optimizer}.warmup_style", None, "constant")(config)
        ),
        f"give {optimizer}.lr_scheduler_type=cosine, or leave it out",
        "refused",
    )
    clip = f"{optimizer}.clip_grad"
    is_same = lambda config: OmegaConf.select(config, f"{group}.grad_clip") == OmegaConf.select(config, clip)  # noqa: E731
    yield Row((f"{group}.grad_clip",), clip, "of the same value", is_same, f"FSDP reads {clip} instead")
    yield Row(
        (f"{group}.grad_clip",), clip, "of another value", lambda config: True, f"give it as {clip}", "always refused"
    )


def _micro_batches(group: str, names: str, dynamic: str, budgets: str) -> Iterator[Row]:
    """Micro-batches have a number of sequences or, with ``use_dynamic_bsz``, a number of tokens."""
    only = "micro-batches are {}; their size changes memory and time, and no gradient"
    for kind, value, packed in ((names, True, "packed by tokens"), (budgets, False, "counted in sequences")):
        keys = " ".join(f"{group}.{name}" for name in kind.split())
        yield _off(keys, f"{group}.{dynamic}", [value], only.format(packed))


_LEAVE: Final = "or leave it out"

#: The table. The first row that fits a key counts.
ROWS: Final[tuple[Row, ...]] = (
    # how long, and from where
    Row(
        ("trainer.total_epochs",),
        "trainer.total_training_steps",
        "reached first, or the length of the data is not known here",
        _epochs_do_not_end_it,
        "the run ends at this step, or with the epochs if they end earlier; for an end by epochs alone give "
        "trainer.total_training_steps=null",
    ),
    Row(
        ("trainer.total_training_steps",),
        "trainer.total_epochs",
        "ended first",
        _epochs_end_it,
        "the data have fewer steps in these epochs: give more of them, or trainer.total_training_steps=null",
        "refused",
    ),
    _off(
        "trainer.resume_from_path",
        "trainer.resume_mode",
        ["disable"],
        f"the run begins with {_MODEL}.path; for that checkpoint give trainer.resume_mode=resume_path",
        "refused",
    ),
    _off(
        "trainer.resume_from_path",
        "trainer.resume_mode",
        ["auto"],
        f"the run would begin with {_MODEL}.path or what its own folder holds; give trainer.resume_mode=resume_path, "
        "or leave the path out",
        "always refused",
    ),
    Row(
        ("trainer.use_v1",),
        "",
        "",
        _is("trainer.use_v1", False),
        "this trainer is verl's V1; leave it out, or train with plain verl (python -m verl.trainer.main_ppo)",
        "refused",
        lambda value: True,
    ),
    # the critic
    Row(
        ("critic.*", "trainer.max_critic_ckpt_to_keep"),
        "algorithm.adv_estimator",
        "other than gae, and critic.enable not true",
        _no_critic,
        "there is no critic",
    ),
    # optimizers and micro-batches
    *_optimizer(_ACTOR),
    *_optimizer("critic"),
    *_micro_batches(
        _ACTOR, "ppo_micro_batch_size ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"
    ),
    *(
        row
        for group in (_REF, _ROLLOUT)
        for row in _micro_batches(
            group,
            "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz",
            "log_prob_max_token_len_per_gpu",
        )
    ),
    *_micro_batches(
        "critic",
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu",
        "use_dynamic_bsz",
        "ppo_max_token_len_per_gpu forward_max_token_len_per_gpu",
    ),
    # advantage, loss and penalties
    *(
        Row(
            (f"algorithm.{name}",),
            "algorithm.adv_estimator",
            "an estimator without it",
            _is_not_read_by(_estimator, name),
            f"leave it out, or take an estimator that reads it, such as {reader}",
            "refused",
        )
        for name, reader in (("norm_adv_by_std_in_grpo", "grpo"), ("lam", "gae"), ("gamma", "gae"))
    ),
    *_of_loss("clip_ratio_low clip_ratio_high", "refused"),
    *_of_loss("clip_ratio_c tau_pos tau_neg policy_loss.clip_cov_ratio policy_loss.clip_cov_lb", "note"),
    *_of_loss("policy_loss.clip_cov_ub policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef policy_loss.dro_beta", "note"),
    Row(
        (f"{_ACTOR}.clip_ratio",),
        f"{_ACTOR}.clip_ratio_low",
        "not null",
        lambda config: config.actor_rollout_ref.actor.clip_ratio_low is not None,
        f"give {_ACTOR}.clip_ratio_low and clip_ratio_high",
        "refused",
    ),
    Row(
        (f"{_ACTOR}.loss_scale_factor",),
        f"{_ACTOR}.loss_agg_mode",
        "other than seq-mean-token-sum-norm",
        lambda config: config.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        f"give {_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm, {_LEAVE}",
        "refused",
    ),
    _off(
        f"{_ACTOR}.kl_loss_coef {_ACTOR}.kl_loss_type",
        f"{_ACTOR}.use_kl_loss",
        [False],
        f"there is no KL loss; give {_ACTOR}.use_kl_loss=true, {_LEAVE}",
        "refused",
    ),
    _off(
        "algorithm.kl_ctrl.* algorithm.kl_penalty",
        "algorithm.use_kl_in_reward",
        [False],
        f"there is no KL penalty in the reward; give algorithm.use_kl_in_reward=true, {_LEAVE}",
        "refused",
    ),
    _off(
        "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
        "algorithm.kl_ctrl.type",
        ["fixed"],
        f"the coefficient stays as it is; give algorithm.kl_ctrl.type=adaptive, {_LEAVE}",
        "refused",
    ),
    _never(
        "algorithm.use_pf_ppo algorithm.pf_ppo.*",
        f"verl's V1 trainer weighs no responses anew; {_LEAVE[3:]}",
        "refused",
    ),
    _never(f"{_ACTOR}.freeze_vision_tower", f"the FSDP engine of verl freezes no weights; {_LEAVE[3:]}", "refused"),
    # rollout correction, dynamic sampling, asynchronous modes
    _off(
        f"{_CORRECTION}.rollout_is_*",
        f"{_CORRECTION}.rollout_is",
        [None],
        f"there are no weights to bound; give {_CORRECTION}.rollout_is=sequence, {_LEAVE}",
        "refused",
    ),
    _off(
        f"{_CORRECTION}.rollout_rs_*",
        f"{_CORRECTION}.rollout_rs",
        [None],
        f"no response is left out; give {_CORRECTION}.rollout_rs=seq_sqrt_k1, for example, {_LEAVE}",
        "refused",
    ),
    _off(
        f"{_CORRECTION}.loss_type",
        f"{_CORRECTION}.bypass_mode",
        [False, None],
        f"the loss is {_ACTOR}.policy_loss.loss_mode",
        "refused",
    ),
    _off(
        f"{_FILTER}.metric {_FILTER}.max_*",
        f"{_FILTER}.enable",
        [False],
        f"no group is filtered out; give {_FILTER}.enable=true, {_LEAVE}",
        "refused",
    ),
    _never(
        f"{_FILTER}.max_num_gen_batches",
        f"verl's V1 trainer draws until the batch is full; {_FILTER}.max_inflight_gen_batches bounds how much at once",
    ),
    _off("data.gen_batch_size", f"{_FILTER}.enable", [True], "prompts are drawn one by one until the batch is full"),
    Row(
        (
            *(f"{_ROLLOUT}.nnodes", f"{_ROLLOUT}.n_gpus_per_node"),
            *("trainer.v1.*_async.*", "trainer.v1.sampler.max_off_policy_*"),
        ),
        "trainer.v1.trainer_mode",
        "synchronous (`mode=sync`)",
        lambda config: server_slots.asynchronous_mode(config) is None,
        "rollout and update take turns on the same devices, and every response is of the policy that is updated",
    ),
    # rollout and validation
    _never(
        f"{_ROLLOUT}.do_sample {_ROLLOUT}.over_sample_rate {_ROLLOUT}.multi_stage_wake_up "
        f"{_ROLLOUT}.engine_kwargs.sglang.* {_ROLLOUT}.engine_kwargs.trtllm.* "
        f"{_ROLLOUT}.multi_turn.num_repeat_rollouts",
        "neither verl's V1 trainer nor its vLLM server reads it",
    ),
    Row(
        (f"{_ROLLOUT}.val_kwargs.*", "trainer.log_val_generations", "trainer.validation_data_dir"),
        "trainer.test_freq",
        "never, and trainer.val_before_train=false",
        _is_not_validated,
        "nothing is validated",
    ),
    _never(
        f"{_ROLLOUT}.val_kwargs.do_sample",
        f"{_ROLLOUT}.val_kwargs.temperature alone says it: 0 takes the likeliest token, anything else draws",
    ),
    Row(
        ("trainer.log_val_generations",),
        "trainer.logger",
        "none that shows texts",
        _shows_no_texts,
        "give trainer.validation_data_dir=FOLDER, or wandb, tensorboard or another logger that shows them",
    ),
    _off(
        f"{_ROLLOUT}.multi_turn.*",
        f"{_ROLLOUT}.agent.default_agent_loop",
        ["single_turn_agent"],
        "responses have one turn, unless the data name another loop (agent_name); give "
        f"{_ROLLOUT}.agent.default_agent_loop=tool_agent",
    ),
    _never(
        f"{_ROLLOUT}.multi_turn.enable",
        f"{_ROLLOUT}.agent.default_agent_loop and the column agent_name of the data say it",
    ),
    _off(f"{_ROLLOUT}.layered_summon", f"{_MODEL}.lora_rank", [0, None], "weights travel layer by layer for LoRA only"),
    # reward
    _off(
        f"{_REWARD_MODEL}.model_path",
        f"{_REWARD_MODEL}.enable",
        [False],
        f"no reward model is started; give {_REWARD_MODEL}.enable=true, {_LEAVE}",
        "refused",
    ),
    _off(
        f"{_REWARD_MODEL}.[!e]* {_REWARD_MODEL}.enable_*",
        f"{_REWARD_MODEL}.enable",
        [False],
        "no reward model is started",
    ),
    # the model and its shards
    _off(
        f"{_MODEL}.lora_alpha {_MODEL}.target_modules {_MODEL}.exclude_modules",
        f"{_MODEL}.lora_rank",
        [0, None],
        f"all weights are trained; give {_MODEL}.lora_rank, {_LEAVE}",
        "refused",
    ),
    _never(
        f"{_MODEL}.lora.[!m]*",
        f"that group is Megatron's, and all weights would be trained; give {_MODEL}.lora_rank and lora_alpha",
        "refused",
    ),
    _off(f"{_MODEL}.fused_kernel_options.*", f"{_MODEL}.use_fused_kernels", [False], "no kernels are fused"),
    _never(
        f"{_REF}.fsdp_config.param_offload {_REF}.fsdp_config.optimizer_offload {_REF}.fsdp_config.offload_policy",
        "verl keeps a model that is not trained on the host in any case",
    ),
    _never(
        f"{_ACTOR}.use_torch_compile {_REF}.use_torch_compile",
        "FSDP reads fsdp_config.use_torch_compile of the same group; give that one",
    ),
    _never(f"{_ACTOR}.fsdp_config.strategy {_REF}.fsdp_config.strategy", f"verl takes {_ACTOR}.strategy"),
    *(
        row
        for shards in (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp")
        for row in (
            _off(
                f"{shards}.param_offload {shards}.optimizer_offload",
                f"{shards}.offload_policy",
                [True],
                "FSDP2 itself moves the weights to the host and back",
            ),
            _off(
                f"{shards}.use_orig_params {shards}.wrap_policy.min_num_params",
                f"{_ACTOR}.strategy",
                ["fsdp2"],
                "only FSDP1 reads it",
            ),
            _off(f"{shards}.offload_policy", f"{_ACTOR}.strategy", ["fsdp"], "only FSDP2 reads it"),
        )
    ),
    Row(
        ("*.turbo_config.*",),
        f"{_ACTOR}.strategy",
        "other than fsdp_turbo",
        _unless(f"{_ACTOR}.strategy", "fsdp_turbo"),
        "it is another engine's",
    ),
    # what has a switch of its own
    _off(
        "distillation.[!e]*", "distillation.enabled", [False], "no teacher is started; give distillation.enabled=true"
    ),
    *(
        _off(f"{group}.*", f"{group}.{switch}", [False], "it is switched off")
        for group, switch in (
            (f"{_MODEL}.mtp", "enable"),
            (f"{_MODEL}.tiled_mlp", "enabled"),
            (f"{_ACTOR}.qat", "enable"),
            (f"{_ACTOR}.fsdp_config.qat", "enable"),
            ("skip.rollout", "enable"),
            ("skip.rollout_tq", "enable"),
            ("skip.async_rollout", "enable"),
            (f"{_ROLLOUT}.disaggregation", "enabled"),
            (f"{_ROLLOUT}.prometheus", "enable"),
        )
    ),
    _off(
        "*.profiler.* global_profiler.[!s]* global_profiler.save_path",
        "global_profiler.steps",
        [None, []],
        "no step is profiled",
    ),
    _off("*.profiler.*", "global_profiler.tool", [None], "no tool is named that could profile"),
    # what verl's V1 trainer has left behind
    _never("transfer_queue.enable", "verl's V1 trainer always has the queue"),
    _off(
        "transfer_queue.backend.MooncakeStore.*",
        "transfer_queue.backend.storage_backend",
        ["SimpleStorage"],
        "the queue keeps its data in its own storage",
    ),
    _never("trainer.balance_batch", "every mini-batch is balanced over the ranks"),
    _never(
        "trainer.esi_redundant_time trainer.ray_wait_register_center_timeout actor_rollout_ref.nccl_timeout "
        "data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.reward_fn_key "
        f"{_ACTOR}.use_prefix_grouper",
        "verl's V1 trainer does not read it",
    ),
)
