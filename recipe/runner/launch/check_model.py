"""The model of a run: where it is, and what is missing of it.

Part of the checks before Ray starts (:mod:`recipe.runner.launch.checks`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig

from recipe.runner.launch.problems import MachineProblem

#: A folder with one of these has a tokenizer.
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
#: A file smaller than this in place of weights is the pointer that git-lfs leaves.
POINTER_BYTES: Final = 1024
_CONFIG: Final = "config.json"
_MODEL: Final = "actor_rollout_ref.model"


def looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).exists()


def model_folder(model: str) -> Path | None:
    """The folder of a model on this machine, the local hub cache included; None if it is not there."""
    folder = Path(model).expanduser()
    if folder.is_dir() or looks_like_a_path(model):
        return folder if folder.is_dir() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def read_model_config(config: DictConfig) -> dict[str, Any]:
    """``config.json`` of a model on this machine; empty for one that would come from the hub."""
    folder = model_folder(config.actor_rollout_ref.model.path)
    return {} if folder is None else _read_json(folder / "config.json")


def model_problems(model: DictConfig) -> Iterator[str]:
    """A model's folder that is missing or incomplete, and its tokenizer. ``model`` is verl's group of that name."""
    yield from _weight_problems(str(model.path))
    yield from _tokenizer_problems(model)


def _weight_problems(model: str) -> Iterator[str]:
    key = f"{_MODEL}.path"
    if not (absent := _absent_files(model_folder(model))):
        return
    if not looks_like_a_path(model):
        if _offline():
            yield MachineProblem(
                f"{key}={model!r}: {absent} is not in the local hub cache and HF_HUB_OFFLINE=1: download it, or give a "
                "folder"
            )
    elif absent == _CONFIG:
        yield MachineProblem(
            f"{key}={model!r} is not a folder with a config.json: give one that holds a model in Hugging Face format "
            "(of a checkpoint `python -m recipe.runner.export` makes one), or a name on the hub"
        )
    else:
        yield MachineProblem(
            f"{key}={model!r} is incomplete: {absent} is missing or a git-lfs pointer; download it again"
        )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE") == "1"


def _absent_files(folder: Path | None) -> str:
    """What of a model is not in its folder, or a git-lfs pointer; empty if nothing."""
    if folder is None or not (folder / _CONFIG).is_file():
        return _CONFIG
    weights = {file.name: file.stat().st_size for file in (*folder.glob("*.safetensors"), *folder.glob("*.bin"))}
    shards = set(_read_json(folder / "model.safetensors.index.json").get("weight_map", {}).values())
    absent = sorted(name for name in shards | weights.keys() if weights.get(name, 0) < POINTER_BYTES)
    return ", ".join(absent[:3]) or ("" if weights else "weights (*.safetensors or *.bin)")


def _tokenizer_problems(model: DictConfig) -> Iterator[str]:
    """A tokenizer that is missing, or has no chat template: verl hands it every prompt, a list of messages."""
    name = "tokenizer_path" if model.get("tokenizer_path") else "path"
    key, folder = f"{_MODEL}.{name}={model[name]!r}", model_folder(model[name])
    if folder is None and not (name == "tokenizer_path" and looks_like_a_path(model[name])):
        return  # on the hub, or said of the model
    if folder is None or not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        if not (looks_like_a_path(model[name]) or _offline()):
            return  # the hub's cache has other files of it
        files = ", ".join(_TOKENIZER_FILES)
        yield MachineProblem(f"{key} has no tokenizer: copy its files ({files}) there, or give a name on the hub")
        return
    settings = _read_json(folder / "tokenizer_config.json")
    if not (settings.get("chat_template") or any(folder.glob("chat_template*")) or model.get("custom_chat_template")):
        yield (
            f"{key} has a tokenizer without a chat template, and prompts are lists of messages: add "
            f"chat_template.jinja to the folder, or set {_MODEL}.custom_chat_template"
        )
