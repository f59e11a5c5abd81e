"""Types of values, by the dataclasses of verl's that read them: a plain dataclass takes ``use_kl_loss=Flase`` for true.

A group of the configuration names its dataclass in ``_target_``: verl's, this repository's or the user's. Its fields
have the types. A key without such a field has the type of verl's default. Values that are verl's defaults are not
looked at, nor are ranges but of sizes, because other rules divide by them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, fields, is_dataclass
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, PositiveInt, TypeAdapter, ValidationError

from recipe.runner.launch.machine import verl_config
from recipe.runner.launch.settings import leaves, resolved

_ACTOR: Final = "actor_rollout_ref.actor"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
#: Types that no dataclass gives: of settings beside verl's groups, and of keys whose default does not tell.
_BY_HAND: Final[dict[str, Any]] = {
    "seed": int,
    "evaluate": bool,
    "dry_run": bool,
    "run.hang_after_s": float | None,
    "run.allow_changed": list[str],
    "trainer.logger": str | list[str],
    "data.train_files": str | list[str] | None,
    "data.val_files": str | list[str] | None,
    "algorithm.rollout_correction.rollout_is_threshold": str | float | None,  # the default is a number
    **dict.fromkeys(
        (
            *(f"data.{name}" for name in ("train_batch_size", "max_prompt_length", "max_response_length")),
            *("trainer.nnodes", "trainer.n_gpus_per_node", f"{_ROLLOUT}.n", f"{_ROLLOUT}.val_kwargs.n"),
            *(f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_epochs", f"{_ROLLOUT}.tensor_model_parallel_size"),
        ),
        PositiveInt,
    ),
}
#: Null is a value of these, whatever their type says: verl or this repository reads it.
_OR_NULL: Final = (
    *("clip_ratio_low", "clip_ratio_high", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio"),
    *("ppo_kl_coef", "max_num_seqs", "max_num_batched_tokens", "max_off_policy_threshold", "parameter_sync_step"),
    *("ppo_max_token_len_per_gpu", "image_patch_size"),
    *("filter_overlong_prompts_workers", "ray_wait_register_center_timeout"),
)
#: What a value has to be if the default is of a type and no dataclass tells more. A bool is no number here.
_BY_DEFAULT: Final[dict[type, Any]] = {
    bool: bool,
    int: int,
    float: float,
    str: str | int | float,  # a name may look like a number
    list: list,
}
_STRICT: Final = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=True)
_PATHS: Final = ("trainer.default_local_dir", "actor_rollout_ref.model.path", "data.train_files", "data.val_files")


def value_problems(config: DictConfig, classes: Mapping[str, type]) -> Iterator[str]:
    """A sentence for each value of a composed configuration that is not verl's default and of a wrong type.

    ``classes`` are the dataclasses of further groups, by key; such a group has no other settings. Hydra names an
    unknown one, but in verl's own command, which has no such group and takes any ``+KEY``.
    """
    for group, settings in classes.items():
        names, given = [field.name for field in fields(settings)], OmegaConf.select(config, group)
        unknown = [name for name in given if name not in names] if OmegaConf.is_dict(given) else ()
        yield from (f"{group}.{name}: there is no such setting; there are {', '.join(names)}" for name in unknown)
    defaults = _verls_defaults()
    for key, text in leaves(OmegaConf.to_container(config)):
        above, _, name = key.rpartition(".")
        refers = isinstance(text, str) and "${" in text and key not in ("seed", *_PATHS)  # to a key that is named
        if text == "???" or name == "_target_" or refers or (key in defaults and defaults[key] == text):
            continue
        try:
            value = resolved(config, key)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            yield f"{key}={text}: {' '.join(str(error).split())}"
            continue
        target, default = classes.get(above) or OmegaConf.select(config, f"{above}._target_"), defaults.get(key)
        is_of_another = str(default).startswith("${")  # which may be null
        of_default = Any if is_of_another else _BY_DEFAULT.get(type(default), Any)
        by_hand = dict | None if key in classes else _BY_HAND.get(key)
        kind = by_hand or (_types(target).get(name) if target else None) or of_default
        may_be_null = is_of_another or name in _OR_NULL
        if not (value is None and may_be_null) and (problem := type_problem(key, value, kind)):
            yield problem
        if key in _PATHS and any(not str(one).strip() for one in (value if isinstance(value, list) else [value])):
            yield f"{key}={value}: a run needs this path; is a variable of the shell not set?"


def type_problem(key: str, value: Any, kind: Any) -> str | None:
    """What is wrong with a value in plain containers that has to be of a type; None if nothing is."""
    if isinstance(value, list) and any(tuple in (one, get_origin(one)) for one in (kind, *get_args(kind))):
        value = tuple(value)  # YAML has lists only
    try:
        TypeAdapter(kind, config=_STRICT).validate_python(value)
    except ValidationError as error:
        wanted = dict.fromkeys(problem["msg"].removeprefix("Input should be ") for problem in error.errors())
        quoted = f""": '{key}="{value}"'""" if "a valid string" in wanted and isinstance(value, int | float) else ""
        return f"{key}={'null' if value is None else value} must be {' or '.join(wanted)}{quoted}"
    return None


@functools.cache
def _verls_defaults() -> dict[str, Any]:
    """Every leaf of verl's defaults, with its references, as verl itself has generated them."""
    text = (verl_config() / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8")
    return dict(leaves(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))))


@functools.cache
def _types(target: str | type) -> dict[str, Any]:
    """The types of a dataclass's fields; none of one that cannot be imported or has none, which others say."""
    try:
        if isinstance(target, str):
            module, _, name = target.rpartition(".")
            target = getattr(importlib.import_module(module), name)
        hints = get_type_hints(target, include_extras=True)
    except Exception:
        return {}
    return {name: _plain(kind) for name, kind in hints.items() if not isinstance(kind, InitVar)}


def _plain(kind: Any) -> Any:
    """The type of a value in plain containers: groups are dictionaries, and of other classes nothing is known."""
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(_plain, get_args(kind)))]  # noqa: UP007  (of a tuple)
    if any(is_dataclass(part) for part in get_args(kind)):
        return get_origin(kind)
    if isinstance(kind, type) and kind not in (bool, int, float, str, list, dict, tuple, type(None)):
        return dict if is_dataclass(kind) else Any
    return kind
