"""Keys that a command gives and that nothing reads, because of another setting.

:data:`ROWS` is the table; a job adds its own (:attr:`recipe.runner.launch.job.Job.without_effect`), and docs/runs.md
shows both. A key counts that the user gave, on the command line or, in a resumed run, when it began; a default or an
experiment's value does not. What would change the training is refused, with the remedy. It is only noted if the run
does anyway what the key asks for: the value is the one that holds without it, it asks for nothing, or the user gave the
setting that disables it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch import inputs
from recipe.runner.launch.compose import SEARCH_PATH, compose, parsed
from recipe.runner.launch.job import Job, Row

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_REF: Final = "actor_rollout_ref.ref"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_CORRECTION: Final = "algorithm.rollout_correction"
_FILTER: Final = "algorithm.filter_groups"
_REWARD_MODEL: Final = "reward.reward_model"
_ABSENT: Final = object()


@dataclass(frozen=True)
class Given:
    """What a command gives.

    Attributes:
        config: The prepared configuration, before the run folder changes what the run begins with.
        job: The kind of run.
        overrides: Those that composed it.
        values: Key and value of every override, those of groups of the configuration left out.
        kept: Those of them with which the run has trained already.
    """

    config: DictConfig
    job: Job
    overrides: tuple[str, ...]
    values: Mapping[str, Any]
    kept: frozenset[str]

    @cached_property
    def without(self) -> DictConfig:
        """The configuration with the groups that were chosen, and without the other overrides."""
        keys = {line: line.partition("=")[0] for line in self.overrides}
        return compose(self.job, [line for line, key in keys.items() if "." not in key or key == SEARCH_PATH])


def given(config: DictConfig, job: Job, overrides: Sequence[str], begun_with: Sequence[str] = ()) -> Given:
    """What the overrides of a run give; it has trained with those of ``begun_with`` already."""
    keys = [str(override.key_or_group) for override in parsed(overrides) if "." in str(override.key_or_group)]
    values = {
        leaf: value for key in keys for leaf, value in _leaves(key, OmegaConf.select(config, key, default=_ABSENT))
    }
    kept = frozenset(str(override.key_or_group) for override in parsed(begun_with))
    return Given(config, job, tuple(overrides), values, kept)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if OmegaConf.is_dict(value):
        for name in value:
            yield from _leaves(f"{key}.{name}", value[name])
    elif value is not _ABSENT:  # removed with ~
        yield key, value


def judged(gives: Given, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """The sentences that refuse a run, and those that a person should read: one for all keys of a row."""
    config, sentences = gives.config, dict[tuple[bool, Row], list[str]]()
    for key, value in gives.values.items():
        row = next((row for row in rows if key in row and row.disables(config)), None)
        if row is not None:
            is_note = row.becomes == "note" or (row.becomes == "refused" and row.switch in gives.values)
            is_note = is_note or not row.asks(value) or key in gives.kept
            is_note = is_note or value == OmegaConf.select(gives.without, key)
            sentences.setdefault((is_note, row), []).append(f"{key}={'null' if value is None else value}")
    texts = {
        at: f"{', '.join(keys)}: no effect{_because(at[1], config)}; {at[1].remedy}" for at, keys in sentences.items()
    }
    refused, notes = ([text for (is_note, _), text in texts.items() if is_note == wanted] for wanted in (False, True))
    return refused, notes


def _because(row: Row, config: DictConfig) -> str:
    value = OmegaConf.select(config, row.switch) if row.switch else None
    return f" with {row.switch}={'null' if value is None else value}" if row.switch else ""


# ---------------------------------------------------------------- what disables


def _is(key: str, *values: Any) -> Callable[[DictConfig], bool]:
    """Whether a setting has one of these values."""
    return lambda config: OmegaConf.select(config, key) in values


def _unless(key: str, *values: Any) -> Callable[[DictConfig], bool]:
    return lambda config: OmegaConf.select(config, key) not in values


def _always(config: DictConfig) -> bool:
    return True


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


def _warms_up(optimizer: str) -> Callable[[DictConfig], bool]:
    return lambda config: OmegaConf.select(config, f"{optimizer}.lr_warmup_steps") > 0


def _micro_batches(group: str, names: str, dynamic: str, budgets: str) -> Iterator[Row]:
    """Micro-batches have a number of sequences or, with ``use_dynamic_bsz``, a number of tokens."""
    switch = f"{group}.{dynamic}"
    yield Row(
        tuple(f"{group}.{name}" for name in names.split()),
        switch,
        "true",
        _is(switch, True),
        "micro-batches are packed by tokens; their size changes no gradient, only memory and time",
    )
    yield Row(
        tuple(f"{group}.{name}" for name in budgets.split()),
        switch,
        "false",
        _is(switch, False),
        "micro-batches are counted in sequences; their size changes no gradient, only memory and time",
    )


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
    Row(
        ("trainer.resume_from_path",),
        "trainer.resume_mode",
        "disable",
        _is("trainer.resume_mode", "disable"),
        "the run begins with actor_rollout_ref.model.path; for that checkpoint give trainer.resume_mode=resume_path",
        "refused",
    ),
    Row(
        ("trainer.resume_from_path",),
        "trainer.resume_mode",
        "auto",
        _is("trainer.resume_mode", "auto"),
        "the run would begin with actor_rollout_ref.model.path or what its own folder holds; give "
        "trainer.resume_mode=resume_path, or leave the path out",
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
    # the optimizer
    Row(
        (f"{_ACTOR}.optim.lr_warmup_steps_ratio",),
        f"{_ACTOR}.optim.lr_warmup_steps",
        "above 0",
        _warms_up(f"{_ACTOR}.optim"),
        f"give {_ACTOR}.optim.lr_warmup_steps=-1 for a share of the run",
        "refused",
    ),
    Row(
        ("critic.optim.lr_warmup_steps_ratio",),
        "critic.optim.lr_warmup_steps",
        "above 0",
        _warms_up("critic.optim"),
        "give critic.optim.lr_warmup_steps=-1 for a share of the run",
        "refused",
    ),
    # micro-batches
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
    # penalties
    Row(
        (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
        f"{_ACTOR}.use_kl_loss",
        "false",
        _is(f"{_ACTOR}.use_kl_loss", False),
        f"there is no KL loss; give {_ACTOR}.use_kl_loss=true, or leave it out",
        "refused",
    ),
    Row(
        ("algorithm.kl_ctrl.*", "algorithm.kl_penalty"),
        "algorithm.use_kl_in_reward",
        "false",
        _is("algorithm.use_kl_in_reward", False),
        "there is no KL penalty in the reward; give algorithm.use_kl_in_reward=true, or leave it out",
        "refused",
    ),
    Row(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        "algorithm.kl_ctrl.type",
        "fixed",
        _is("algorithm.kl_ctrl.type", "fixed"),
        "the coefficient stays as it is; give algorithm.kl_ctrl.type=adaptive, or leave it out",
        "refused",
    ),
    # rollout correction and dynamic sampling
    Row(
        (f"{_CORRECTION}.rollout_is_*",),
        f"{_CORRECTION}.rollout_is",
        "null",
        _is(f"{_CORRECTION}.rollout_is", None),
        f"there are no weights to bound; give {_CORRECTION}.rollout_is=sequence, or leave it out",
        "refused",
    ),
    Row(
        (f"{_CORRECTION}.rollout_rs_*",),
        f"{_CORRECTION}.rollout_rs",
        "null",
        _is(f"{_CORRECTION}.rollout_rs", None),
        f"no response is left out; give {_CORRECTION}.rollout_rs=seq_sqrt_k1, for example, or leave it out",
        "refused",
    ),
    Row(
        (f"{_CORRECTION}.loss_type",),
        f"{_CORRECTION}.bypass_mode",
        "false",
        _is(f"{_CORRECTION}.bypass_mode", False, None),
        f"the loss is {_ACTOR}.policy_loss.loss_mode",
        "refused",
    ),
    Row(
        (f"{_FILTER}.metric", f"{_FILTER}.max_*"),
        f"{_FILTER}.enable",
        "false",
        _is(f"{_FILTER}.enable", False),
        f"no group is filtered out; give {_FILTER}.enable=true, or leave it out",
        "refused",
    ),
    Row(
        (f"{_FILTER}.max_num_gen_batches",),
        "",
        "",
        _always,
        f"verl's V1 trainer draws until the batch is full; {_FILTER}.max_inflight_gen_batches bounds how much at once",
    ),
    Row(
        ("data.gen_batch_size",),
        f"{_FILTER}.enable",
        "true",
        _is(f"{_FILTER}.enable", True),
        "prompts are drawn one by one until the batch is full",
    ),
    # reward
    Row(
        (f"{_REWARD_MODEL}.model_path",),
        f"{_REWARD_MODEL}.enable",
        "false",
        _is(f"{_REWARD_MODEL}.enable", False),
        f"no reward model is started; give {_REWARD_MODEL}.enable=true, or leave it out",
        "refused",
    ),
    Row(
        (f"{_REWARD_MODEL}.[!e]*", f"{_REWARD_MODEL}.enable_*"),
        f"{_REWARD_MODEL}.enable",
        "false",
        _is(f"{_REWARD_MODEL}.enable", False),
        "no reward model is started",
    ),
    # the model
    Row(
        (f"{_MODEL}.lora_alpha", f"{_MODEL}.target_modules", f"{_MODEL}.exclude_modules"),
        f"{_MODEL}.lora_rank",
        "0",
        _is(f"{_MODEL}.lora_rank", 0, None),
        f"all weights are trained; give {_MODEL}.lora_rank, or leave it out",
        "refused",
    ),
)
