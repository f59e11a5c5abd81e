"""The words of a command, keys of a configuration, and what the configuration is on this machine."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from recipe.runner.launch.machine import pass_to_ray_workers, starts_ray

#: Arguments of ``ray.init`` that describe a cluster to start; it refuses them when it joins one.
_ONLY_TO_START_RAY: Final = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
#: Files and folders that workers read, which have another working folder. One that is not here may be on the hub.
PATHS: Final = (
    *(f"{_MODEL}.{name}" for name in ("path", "tokenizer_path", "lora_adapter_path")),
    *(f"{_ROLLOUT}.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path")),
    f"{_ROLLOUT}.agent.agent_loop_config_path",
    f"{_ROLLOUT}.engine_kwargs.vllm.generation_config",
    "data.custom_cls.path",
    "reward.custom_reward_function.path",
    "reward.reward_manager.module.path",
    "trainer.resume_from_path",
)
#: Of the group ``data``.
DATA: Final = ("train_files", "val_files")


def parsed(words: Iterable[str]) -> list[Override]:
    """Words in Hydra's grammar of overrides; HydraException for one that is none."""
    return OverridesParser.create().parse_overrides(list(words))


def key_of(override: Override) -> str:
    """Its key, or its group with the package."""
    return str(override.key_or_group)


def quoted(value: object) -> str:
    """A value as a string of Hydra's grammar, whatever characters it has."""
    return "'" + str(value).replace("'", r"\'") + "'"


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values of a group in plain containers, and of those inside it. A list is a value."""
    if isinstance(value, Mapping):
        for name in value:
            yield from leaves(value[name], f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def is_below(key: str, parents: Iterable[str]) -> bool:
    """Whether a key is one of these, or lies below one."""
    return any(f"{key}.".startswith(f"{parent}.") for parent in parents)


def files_of(data: DictConfig, name: str) -> list[str]:
    """``data.train_files`` or ``data.val_files``, which may be one path or a list."""
    value = data.get(name)
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, ListConfig | list) else [str(value)]


def absolute(path: str) -> str:
    """A path that means the same in another working folder; an address as it is."""
    path = path.removeprefix("file://")
    return path if "://" in path else str(Path(path).expanduser().absolute())


def on_this_machine(config: DictConfig, elsewhere: bool = False) -> None:
    """Write absolute paths and Ray's arguments into a composed configuration, in place.

    With ``elsewhere`` the run will be on another machine, and what this one's platform would need is left out.
    """
    from recipe.runner.faults.resources import needs_of  # imports Ray, which reads its variables then

    with open_dict(config):
        config.trainer.default_local_dir = absolute(str(config.trainer.default_local_dir))
        for key in PATHS:
            place = str(OmegaConf.select(config, key) or "")
            if place.startswith("pkg://") and key in PATHS[:2]:  # a model of an installed package
                package, _, inside = place.removeprefix("pkg://").partition("/")
                place = str(importlib.resources.files(package) / inside)
            place = place.removeprefix("file://")
            if place and "://" not in place and Path(place).expanduser().exists():
                OmegaConf.update(config, key, absolute(place))
        for name in DATA:
            config.data[name] = [absolute(file) for file in files_of(config.data, name)]
        ray_init = config.ray_kwargs.ray_init
        if starts_ray(ray_init):
            # Without an address Ray joins the cluster that the temp folder names, be it one that was killed.
            ray_init.address = "local"
            if config.trainer.device == "cpu" and ray_init.get("num_gpus", 0) is None:
                ray_init.num_gpus = needs_of(config).gpus  # logical: one for each rank
        else:
            for key in _ONLY_TO_START_RAY:
                ray_init.pop(key, None)
        if not elsewhere:
            pass_to_ray_workers(config.trainer, ray_init)
