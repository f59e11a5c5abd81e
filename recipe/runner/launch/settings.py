"""Words of a command, keys of a configuration, and what a start is refused for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

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


class MachineProblem(str):
    """A problem that only the machine of the run can settle: a GPU, a package or a file that is not here."""


class Refused(ValueError):
    """Everything that is wrong with a command, one problem a line; nothing was started or written."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(f"error: {problem}" for problem in problems))


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


def resolved(config: DictConfig, key: str) -> Any:
    """The value of a key in plain containers, with its references resolved. Raises what OmegaConf and resolvers do."""
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


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
    return path if "://" in path else str(Path(path).expanduser().absolute())
