"""Type and range of each setting by itself, checked by pydantic.

A group of the configuration names its dataclass in ``_target_``: verl's, this repository's or the user's. Its fields
have the types. A key without such a field has the type of its default. By hand there are only ranges.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, is_dataclass
from fnmatch import fnmatchcase
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from recipe.runner.launch.attempt import attempt
from recipe.runner.launch.compose import HANDED_ON, has_key, is_group

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
#: What an empty text is never meant for: a variable of the shell that is not set gives one.
_NEEDED: Final = {
    "run.dir": "a folder",
    "actor_rollout_ref.model.path": "a model",
    "data.train_files": "training data",
    "data.val_files": "validation data",
}


class MachineProblem(str):
    """A problem that only the machine of the run can settle: a GPU, a package or a file that is not here."""


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
    allow_changed: list[str]


#: Kinds of values, and the keys that are of them: what a type alone does not tell. The other types are those of the
#: dataclass that a group names in ``_target_``, or else that of the default.
_RANGES: Final[tuple[tuple[Any, str], ...]] = (
    (Count, "trainer.nnodes trainer.n_gpus_per_node trainer.total_epochs reward.num_workers"),
    (Count, "data.train_batch_size data.max_prompt_length data.max_response_length"),
    (Count, f"{_ACTOR}.ppo_mini_batch_size {_ACTOR}.ppo_max_token_len_per_gpu {_ACTOR}.ppo_epochs"),
    (Count, f"{_ACTOR}.ulysses_sequence_parallel_size {_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
    (Count, f"{_ROLLOUT}.n {_ROLLOUT}.val_kwargs.n {_ROLLOUT}.log_prob_max_token_len_per_gpu"),
    (Count, f"{_ROLLOUT}.tensor_model_parallel_size {_ROLLOUT}.data_parallel_size"),
    (Count, f"{_ROLLOUT}.pipeline_model_parallel_size {_ROLLOUT}.max_num_seqs {_ROLLOUT}.max_num_batched_tokens"),
    (Count, f"{_ROLLOUT}.agent.num_workers"),
    (Count, "actor_rollout_ref.model.lora_alpha"),  # verl saves int(lora_alpha), and an export reads that
    (Count | None, "trainer.total_training_steps trainer.max_actor_ckpt_to_keep"),
    (Count | None, f"{_ACTOR}.ppo_micro_batch_size_per_gpu {_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    (Annotated[int, Field(ge=0, lt=2**32)], "seed"),  # NumPy's, in vLLM
    (CountOrZero, "trainer.critic_warmup actor_rollout_ref.model.lora_rank"),
    (CountOrZero, f"{_ROLLOUT}.nnodes {_ROLLOUT}.n_gpus_per_node"),
    (StepsOrNever, f"trainer.save_freq trainer.test_freq {_ACTOR}.optim.lr_warmup_steps"),
    (Count | Literal[-1], f"{_ACTOR}.fsdp_config.fsdp_size data.train_max_samples data.val_max_samples"),
    # Policies of language models are trained with 1e-7 to 1e-4: from 0.01 on it is a learning rate of another unit.
    (Annotated[float, Field(gt=0, lt=0.01)], f"{_ACTOR}.optim.lr"),
    (Annotated[float, Field(gt=0, allow_inf_nan=True)], f"{_ACTOR}.optim.clip_grad"),  # PyTorch's inf is no clip
    (Positive, f"{_ROLLOUT}.temperature"),
    (PositiveOrZero, f"{_ROLLOUT}.val_kwargs.temperature"),
    (PositiveOrZero, f"{_ACTOR}.kl_loss_coef algorithm.kl_ctrl.kl_coef {_ACTOR}.optim.weight_decay"),
    (Annotated[float, Field(ge=0, le=1)], f"{_ACTOR}.optim.lr_warmup_steps_ratio"),
    (Annotated[float, Field(ge=0, le=1)] | None, f"{_ACTOR}.optim.min_lr_ratio"),
    (Literal["constant", "cosine"], f"{_ACTOR}.optim.lr_scheduler_type"),
    (Literal["fixed", "adaptive"], "algorithm.kl_ctrl.type"),
    (Literal["cpu", "cuda", "npu", "xpu", "mlu", "metax"], "trainer.device"),  # those that verl names
    (Count | None, "ray_kwargs.ray_init.num_cpus"),
    (CountOrZero | None, "ray_kwargs.ray_init.num_gpus"),
    (Literal["error", "left", "right", "middle"], "data.truncation"),
    (Count, "algorithm.kl_ctrl.horizon"),
    (PositiveOrZero, " ".join(f"{_ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high"))),
    (PositiveOrZero, "trainer.v1.colocate_async.num_warmup_batches trainer.v1.separate_async.num_warmup_batches"),
    (Annotated[float, Field(gt=0, le=1)], f"{_ROLLOUT}.gpu_memory_utilization"),
    (Annotated[float, Field(gt=0, le=1)], f"{_ROLLOUT}.top_p {_ROLLOUT}.val_kwargs.top_p"),
    (dict, "reward.custom_reward_function.reward_kwargs"),
    (Literal["auto", "disable", "resume_path"], "trainer.resume_mode"),
    (str | list[str], "trainer.logger"),
    (str, "trainer.default_local_dir trainer.v1.trainer_mode"),
    (dict, f"trainer.v1 {_ACTOR}.policy_loss"),
    (str | list[str] | None, "data.train_files data.val_files"),
    (str | float | None, "algorithm.rollout_correction.rollout_is_threshold"),  # the default is a number
    (Dtype, f"{_ROLLOUT}.dtype"),
    *(
        (Dtype | None, f"actor_rollout_ref.{engine}.fsdp_config.{name}dtype")
        for engine in ("actor", "ref")
        for name in ("", "model_", "mixed_precision.param_", "mixed_precision.reduce_", "mixed_precision.buffer_")
    ),
)
#: Groups that name no dataclass.
_OURS: Final = {"run.": RunSettings}
_BY_HAND: Final = {key: kind for kind, keys in _RANGES for key in keys.split()}
#: Keys that verl's code takes null for, whatever the type in its dataclass says.
NULL_TOO: Final = (
    "*.clip_ratio_low",  # its losses then take clip_ratio
    "*.clip_ratio_high",
    "critic.forward_micro_batch_size*",
    "reward.reward_model.rollout.mtp",
)
#: What a value has to be if the default is of a type and no dataclass tells more. A bool is no number here.
_BY_DEFAULT: Final[dict[type, Any]] = {
    bool: bool,
    int: int | None,
    float: float | None,
    str: str | int | float | None,  # a name may look like a number
    list: list | None,
    dict: dict,
}
_STRICT: Final = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


def types_of(settings: type) -> dict[str, Any]:
    """The types of a dataclass's fields, groups of settings as dictionaries, but for those of its constructor only."""
    hints = get_type_hints(settings, include_extras=True)
    return {name: _plain(kind) for name, kind in hints.items() if not isinstance(kind, InitVar)}


def _plain(kind: Any) -> Any:
    """The type of a value in plain containers: groups are dictionaries, and of other classes nothing is known."""
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(_plain, get_args(kind)))]  # noqa: UP007  (of a tuple)
    if any(is_dataclass(part) for part in get_args(kind)):
        return get_origin(kind)
    if isinstance(kind, type) and kind not in (*_BY_DEFAULT, tuple, type(None)):
        return dict if is_dataclass(kind) else Any
    return kind


@functools.cache
def _class_types(settings: type) -> dict[str, Any]:
    return types_of(settings)


def _target_types(target: str) -> dict[str, Any]:
    """The types of the class that ``_target_`` names; none of one that cannot be imported or has none.

    The rules of a job say what is wrong with such a class.
    """
    module, _, name = target.rpartition(".")
    types, _ = attempt(lambda: _class_types(getattr(importlib.import_module(module), name)))
    return types or {}


def problem_of(key: str, value: Any, kind: Any, reference: str | None = None) -> str | None:
    """What is wrong with a value in plain containers that has to be of a type; None if nothing is.

    A value from a ``reference`` is shown as that.
    """
    if value is None and any(fnmatchcase(key, pattern) for pattern in NULL_TOO):
        return None
    plain = value
    if isinstance(value, list) and any(tuple in (one, get_origin(one)) for one in (kind, *get_args(kind))):
        value = tuple(value)  # YAML has lists only
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as error:
        wanted = [problem["msg"].removeprefix("Input should be ") for problem in error.errors()]
        if get_origin(kind) is tuple:
            wanted = [f"a list of {', '.join(getattr(part, '__name__', str(part)) for part in get_args(kind))}"]
        switch = " (true or false)" if "a valid boolean" in wanted else ""
        group = f": {is_group(key)}" if kind is dict else ""
        shown = "null" if value is None else plain if reference is None else reference
        return f"{key}={shown} must be {' or '.join(dict.fromkeys(wanted))}{switch}{group}"
    return None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=_STRICT)


def type_problems(values: Mapping[str, Any], types: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """A sentence for every value, in plain containers, that does not fit its type. A name that is absent is passed."""
    problems = (problem_of(f"{place}{name}", values[name], kind) for name, kind in types.items() if name in values)
    yield from filter(None, problems)


def _walk(
    config: DictConfig, values: Mapping[str, Any], defaults: DictConfig | None, classes: bool, place: str = ""
) -> Iterator[str]:
    """A sentence for every value of a group that does not fit its type, by whatever tells that first.

    A default that refers to another key is passed: that key is named. ``values`` is the group with its references.
    """
    target = values.get("_target_")
    types = types_of(_OURS[place]) if place in _OURS else _target_types(str(target)) if target and classes else {}
    for name, value in values.items():
        key = f"{place}{name}"
        reference = value if isinstance(value, str) and "${oc." in value else None
        if isinstance(value, str) and "${" in value:
            if defaults is None or _refers(defaults, key):
                continue
            value = _container(OmegaConf.select(config, key))
        kind, default = _BY_HAND.get(key, types.get(name, _ABSENT)), _default(defaults, key)
        if kind is _ABSENT:
            kind = _BY_DEFAULT.get(type(default), Any)
        # verl's engines have null where a hint forbids it.
        is_verls = value is None and default is None and name in types and key not in _BY_HAND
        if value != "???" and not is_verls and (problem := problem_of(key, value, kind, reference)):
            yield problem
        elif isinstance(value, dict):
            yield from _walk(config, value, defaults, classes, f"{key}.")


def named_key(problem: str) -> str:
    """The key of which a sentence of :func:`value_problems` says what is wrong."""
    return problem.partition("=")[0]


def set_default(config: DictConfig, key: str, defaults: DictConfig) -> None:
    """Give a key its default, or take it out if it has none; in place."""
    above, _, name = key.rpartition(".")
    group = OmegaConf.select(config, above) if above else config
    with open_dict(group):
        group.pop(name, None)
        if has_key(defaults, key):
            group[name] = OmegaConf.select(defaults, key)


def _container(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _refers(config: DictConfig, key: str) -> bool:
    """Whether the value of a key is a reference to another."""
    above, _, name = key.rpartition(".")
    group = OmegaConf.select(config, above, throw_on_resolution_failure=False) if above else config
    return OmegaConf.is_dict(group) and name in group and OmegaConf.is_interpolation(group, name)


def _default(defaults: DictConfig | None, key: str) -> Any:
    """The default of a key, in plain containers; None if there is none, or if it is handed on to other code."""
    if defaults is None or HANDED_ON.search(key):
        return None
    value = OmegaConf.select(defaults, key, throw_on_resolution_failure=False)
    return ({} if OmegaConf.is_dict(value) else []) if OmegaConf.is_config(value) else value


def kind_problems(config: DictConfig, defaults: DictConfig | None = None, classes: bool = True) -> Iterator[str]:
    """Type and range of every value; the arguments are those of :func:`value_problems`."""
    return _walk(config, OmegaConf.to_container(config), defaults, classes)


def value_problems(config: DictConfig, defaults: DictConfig | None = None, classes: bool = True) -> Iterator[str]:
    """Type and range of every value, and the run's folder.

    Runs before all other checks, which do arithmetic with the values.

    Args:
        config: The composed configuration. Values are checked as its references are resolved.
        defaults: The same without the values that the command gives (:func:`recipe.runner.launch.compose.defaults`);
            without it nothing is known of keys that no dataclass has.
        classes: Whether the dataclasses of the groups are looked at, which imports verl.
    """
    yield from kind_problems(config, defaults, classes)
    if not OmegaConf.is_dict(config.trainer):
        return
    for key, what in _NEEDED.items():
        if key.startswith("data.") and OmegaConf.select(config, "data.custom_cls.path"):
            continue  # a class of the user's reads what it likes
        value = OmegaConf.select(config, key)
        for one in value if OmegaConf.is_list(value) else [value]:
            if one is not None and not str(one).strip():
                yield f"{key}={one}: a run needs {what}; is a variable of the shell not set?"
    if str(config.run.dir).startswith("~"):
        yield f"run.dir={config.run.dir}: no shell writes out a ~ after run.dir=: give $HOME/... instead"
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
    """Why the run would not save in its own folder; None if it does, or if ``trainer`` is no group."""
    if not OmegaConf.is_dict(config.trainer):
        return None
    saved = str(config.trainer.default_local_dir)
    if os.path.abspath(saved) == os.path.abspath(config.run.dir):
        return None
    return (
        f"trainer.default_local_dir={saved}: a run saves in its folder, where all commands look for checkpoints; "
        "leave it out, and give run.dir=FOLDER on the disk that has the room"
    )
