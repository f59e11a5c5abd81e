"""What a setting must be by itself, its kind and range, whatever the others are.

Said before all other checks and by the planner, because everything else computes with these values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.runner.launch.removed import LIBRARY_LOSS

_ACTOR: Final = "actor_rollout_ref.actor"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_POLICY_LOSS: Final = f"{_ACTOR}.policy_loss"
_ABSENT: Final = object()
_ENDLESS: Final = 1000000  # trainer.total_epochs in conf/base.yaml


class PreflightError(ValueError):
    """Everything that is wrong with a configuration, one problem a line."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(f"error: {problem}" for problem in self.problems))


def _whole(value: Any, least: float) -> bool:
    return type(value) is int and value >= least


def _number(value: Any, least: float) -> bool:
    return type(value) in (int, float) and value >= least


#: What a setting must be, the test of it, and the settings.
_VALUES: Final[tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...]] = (
    (
        "a whole number of 1 or more",
        lambda value: _whole(value, 1),
        (
            "trainer.nnodes",
            "trainer.n_gpus_per_node",
            "trainer.total_epochs",
            "data.train_batch_size",
            "data.max_prompt_length",
            "data.max_response_length",
            f"{_ACTOR}.ppo_mini_batch_size",
            f"{_ACTOR}.ppo_max_token_len_per_gpu",
            f"{_ACTOR}.ppo_epochs",
            f"{_ACTOR}.ulysses_sequence_parallel_size",
            f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            f"{_ROLLOUT}.n",
            f"{_ROLLOUT}.val_kwargs.n",
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
            f"{_ROLLOUT}.tensor_model_parallel_size",
            f"{_ROLLOUT}.data_parallel_size",
            f"{_ROLLOUT}.pipeline_model_parallel_size",
            f"{_ROLLOUT}.max_num_seqs",
            f"{_ROLLOUT}.max_num_batched_tokens",
            f"{_ROLLOUT}.agent.num_workers",
            "reward.num_workers",
            "fspo.window_steps",
            "fspo.lre_bins",
            "fspo.calibration_rounds",
        ),
    ),
    (
        "a whole number of 1 or more, or null",
        lambda value: value is None or _whole(value, 1),
        (
            "trainer.total_training_steps",
            "trainer.max_actor_ckpt_to_keep",
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
            f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        ),
    ),
    (
        "a whole number of 0 or more",
        lambda value: _whole(value, 0),
        (
            "seed",
            "trainer.critic_warmup",
            "actor_rollout_ref.model.lora_rank",
            f"{_ROLLOUT}.nnodes",
            f"{_ROLLOUT}.n_gpus_per_node",
            "fspo.restarts",
        ),
    ),
    (
        "a whole number of steps, or -1 for never",
        lambda value: _whole(value, -1),
        ("trainer.save_freq", "trainer.test_freq", f"{_ACTOR}.optim.lr_warmup_steps"),
    ),
    (
        "a whole number of ranks, or -1 for all",
        lambda value: _whole(value, 1) or value == -1,
        (f"{_ACTOR}.fsdp_config.fsdp_size",),
    ),
    (
        "a number of seconds from 10 on, or null for no limit",
        lambda value: value is None or _number(value, 10),
        ("fspo.hang_after_s",),
    ),
    (
        "a number of 0 or more",
        lambda value: _number(value, 0),
        (
            "fspo.wait_for_resources_s",
            "fspo.poll_interval_s",
            f"{_ROLLOUT}.val_kwargs.temperature",
            "trainer.v1.colocate_async.num_warmup_batches",
            "trainer.v1.separate_async.num_warmup_batches",
        ),
    ),
    (
        "a number above 0",
        lambda value: _number(value, 0) and value != 0,
        (f"{_ROLLOUT}.temperature", f"{_ACTOR}.grad_clip"),
    ),
    (
        "a number above 0, and 1 at most",
        lambda value: _number(value, 0) and 0 < value <= 1,
        (f"{_ROLLOUT}.gpu_memory_utilization",),
    ),
    (
        "a number, or null for the loss's own",
        lambda value: value is None or _number(value, -math.inf),
        tuple(
            f"{_POLICY_LOSS}.{name}"
            for name in ("clip_low", "clip_high", "grad_multiplier", "s_max", "target_acceptance")
        ),
    ),
    (
        "auto, disable or resume_path",
        lambda value: value in ("auto", "disable", "resume_path"),
        ("trainer.resume_mode",),
    ),
    (
        "a logger or a list of them, such as [console]",
        lambda value: isinstance(value, str | ListConfig),
        ("trainer.logger",),
    ),
    (
        "a folder, or a name on the hub",
        lambda value: isinstance(value, str) and value != "",
        ("actor_rollout_ref.model.path",),
    ),
)


def value_problems(config: DictConfig) -> Iterator[str]:
    """A sentence for every value that is of another kind or out of range."""
    of_the_library = config.actor_rollout_ref.actor.policy_loss.get("_target_") == LIBRARY_LOSS
    for what, fits, keys in _VALUES:
        for key in keys:
            if key.startswith(_POLICY_LOSS) and not of_the_library:
                continue  # a loss of the user's may mean something else by the name
            value = OmegaConf.select(config, key, default=_ABSENT)  # another engine has other keys
            if value is not _ABSENT and not fits(value):
                yield f"{key}={'null' if value is None else value} must be {what}"
    if config.trainer.total_training_steps is None and config.trainer.total_epochs == _ENDLESS:
        yield "trainer.total_training_steps=null: give it, or trainer.total_epochs; with neither the run has no end"
    saved = str(config.trainer.default_local_dir)
    if os.path.abspath(saved) != os.path.abspath(f"{config.fspo.run_dir}/checkpoints"):
        yield (
            f"trainer.default_local_dir={saved}: a run saves in its folder, where all commands look for checkpoints; "
            "leave it out, and give fspo.run_dir=FOLDER on the disk that has the room"
        )


def check_values(config: DictConfig) -> None:
    """What precedes all other checks: they compute with the values.

    Raises:
        PreflightError: listing all values that are of another kind or out of range.
    """
    if problems := list(value_problems(config)):
        raise PreflightError(*problems)
