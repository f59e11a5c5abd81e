"""Type and range of each setting by itself, checked by pydantic.

Our own groups are dataclasses. Of verl's settings, only those that the checks compute with have a type here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass
from typing import Annotated, Any, Final, Literal, get_type_hints

from omegaconf import DictConfig, OmegaConf
from pydantic import Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
#: A number of steps, or -1 for never or for all.
StepsOrNever = Annotated[int, Field(ge=-1)]
Positive = Annotated[float, Field(gt=0)]
#: More than none and less than all.
Share = Annotated[float, Field(gt=0, lt=1)]
PositiveOrZero = Annotated[float, Field(ge=0)]
#: Names of types of numbers that verl, torch and vLLM understand alike.
Dtype = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]

_ACTOR: Final = "actor_rollout_ref.actor"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_ABSENT: Final = object()
_ENDLESS: Final = 1000000  # trainer.total_epochs in conf/base.yaml


class MachineProblem(str):
    """A problem that only the machine of the run can settle: a GPU, a login, a package or a file that is not here."""


class PreflightError(ValueError):
    """Everything that is wrong with a configuration, one problem a line."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(f"error: {problem}" for problem in self.problems))


@dataclass(frozen=True)
class RunSettings:
    """The settings ``run.*``; ``recipe/runner/conf/run.yaml`` has their values and says what each does."""

    dir: str
    hang_after_s: Annotated[float, Field(ge=10)] | None
    log: Literal["headline", "all"] | list[str]
    mean_response: Positive | None
    allow_changed: list[str]


#: Settings of verl that are counts, by their group; and those that may be null too.
_COUNTS: Final = {
    "trainer": "nnodes n_gpus_per_node total_epochs",
    "data": "train_batch_size max_prompt_length max_response_length",
    _ACTOR: "ppo_mini_batch_size ppo_max_token_len_per_gpu ppo_epochs ulysses_sequence_parallel_size",
    f"{_ACTOR}.fsdp_config": "ulysses_sequence_parallel_size",
    _ROLLOUT: "n val_kwargs.n log_prob_max_token_len_per_gpu tensor_model_parallel_size data_parallel_size "
    "pipeline_model_parallel_size max_num_seqs max_num_batched_tokens agent.num_workers",
    "reward": "num_workers",
}
_COUNTS_OR_NULL: Final = (
    *("trainer.total_training_steps", "trainer.max_actor_ckpt_to_keep"),
    *(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
)
#: Settings of verl and of the root, and their types.
_TYPES: Final[dict[str, Any]] = {
    "seed": CountOrZero,
    "actor_rollout_ref.model.path": str,
    "actor_rollout_ref.model.lora_rank": CountOrZero,
    "actor_rollout_ref.model.lora_alpha": Count,  # verl saves int(lora_alpha), and an export reads that
    # Policies of language models are trained with 1e-7 to 1e-4: from 0.01 on it is a learning rate of another unit.
    f"{_ACTOR}.optim.lr": Annotated[float, Field(gt=0, lt=0.01)],
    f"{_ACTOR}.optim.lr_warmup_steps": StepsOrNever,
    f"{_ACTOR}.optim.clip_grad": Positive,
    f"{_ACTOR}.fsdp_config.fsdp_size": Count | Literal[-1],
    f"{_ROLLOUT}.nnodes": CountOrZero,
    f"{_ROLLOUT}.n_gpus_per_node": CountOrZero,
    f"{_ROLLOUT}.temperature": Positive,
    f"{_ROLLOUT}.val_kwargs.temperature": PositiveOrZero,
    f"{_ROLLOUT}.gpu_memory_utilization": Annotated[float, Field(gt=0, le=1)],
    f"{_ROLLOUT}.dtype": Dtype,
    f"{_ROLLOUT}.custom": dict | None,
    f"{_ROLLOUT}.custom.stop_token_ids": list[CountOrZero] | None,
    "reward.custom_reward_function.reward_kwargs": dict,
    "trainer.critic_warmup": CountOrZero,
    "trainer.save_freq": StepsOrNever,
    "trainer.test_freq": StepsOrNever,
    "trainer.resume_mode": Literal["auto", "disable", "resume_path"],
    "trainer.logger": str | list[str],
    "trainer.v1.colocate_async.num_warmup_batches": PositiveOrZero,
    "trainer.v1.separate_async.num_warmup_batches": PositiveOrZero,
    **dict.fromkeys((f"{group}.{name}" for group, names in _COUNTS.items() for name in names.split()), Count),
    **dict.fromkeys(_COUNTS_OR_NULL, Count | None),
    **{
        f"actor_rollout_ref.{engine}.fsdp_config.{name}dtype": Dtype | None
        for engine in ("actor", "ref")
        for name in ("", "model_", "mixed_precision.param_", "mixed_precision.reduce_", "mixed_precision.buffer_")
    },
}


def types_of(group: str, settings: type) -> dict[str, Any]:
    """The types of a dataclass's own fields, by the keys that they have in a configuration."""
    hints = get_type_hints(settings, include_extras=True)
    own = (name for name in settings.__annotations__ if not isinstance(hints[name], InitVar))
    return {f"{group}.{name}": hints[name] for name in own}


def type_problems(config: DictConfig, types: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for every setting whose value does not fit its type. A key that the configuration lacks is passed."""
    for key, kind in types.items():
        value = OmegaConf.select(config, key, default=_ABSENT)
        if value is _ABSENT:  # another engine, say, has other keys
            continue
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        try:
            TypeAdapter(kind).validate_python(plain, strict=True)
        except ValidationError as error:
            wanted = [problem["msg"].removeprefix("Input should be ") for problem in error.errors()]
            yield f"{key}={'null' if plain is None else plain} must be {' or '.join(wanted)}"


def value_problems(config: DictConfig) -> Iterator[str]:
    """Type and range of every value, and the run's end and folder.

    Runs before all other checks, which do arithmetic with the values.
    """
    yield from type_problems(config, _TYPES | types_of("run", RunSettings))
    if config.trainer.total_training_steps is None and config.trainer.total_epochs == _ENDLESS:
        yield "trainer.total_training_steps=null: give it, or trainer.total_epochs; with neither the run has no end"
    if not str(config.run.dir or "").strip():
        yield f"run.dir={config.run.dir}: a run needs a folder; is a variable of the shell not set?"
    yield from name_problems(config)
    if problem := folder_problem(config):
        yield problem


def name_problems(config: DictConfig) -> Iterator[str]:
    """Names that are parts of folders' names, and would lead out of these."""
    for key in ("trainer.experiment_name", "trainer.project_name"):
        name = str(OmegaConf.select(config, key))
        if name.startswith(("/", "~")) or ".." in name.split("/") or not name.strip() or "\0" in name:
            yield f"{key}={name!r} becomes a part of folders' names: give a name without .. and without / at its start"


def folder_problem(config: DictConfig) -> str | None:
    """Why the run would not save in its own folder; None if it does."""
    saved = str(config.trainer.default_local_dir)
    if os.path.abspath(saved) == os.path.abspath(f"{config.run.dir}/checkpoints"):
        return None
    return (
        f"trainer.default_local_dir={saved}: a run saves in its folder, where all commands look for checkpoints; "
        "leave it out, and give run.dir=FOLDER on the disk that has the room"
    )
