"""What a model's folder has to hold: a configuration, all weights, a tokenizer with a chat template.

Part of the checks before Ray starts (:mod:`recipe.runner.launch.checks`). Reads only small files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omegaconf import DictConfig

#: A folder with one of these has a tokenizer.
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
#: A file smaller than this in place of weights is the pointer that git-lfs leaves.
_POINTER_BYTES: Final = 1024


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).exists()


def find(model: str) -> Path | None:
    """The folder of a model on this machine, the local hub cache included; None if it is not there."""
    folder = Path(model).expanduser()
    if folder.is_dir() or _looks_like_a_path(model):
        return folder if folder.is_dir() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def read_model_config(config: DictConfig) -> dict[str, object] | None:
    """``config.json`` of a model on this machine; None for one that would come from the hub."""
    folder = find(config.actor_rollout_ref.model.path)
    path = None if folder is None else folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else None


def problems(config: DictConfig) -> Iterator[str]:
    """What is wrong with the model's folder."""
    yield from _model_problems(config)
    yield from _tokenizer_problems(config)


def _model_problems(config: DictConfig) -> Iterator[str]:
    key, model = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    folder = Path(model).expanduser()
    if not _looks_like_a_path(model):
        if os.environ.get("HF_HUB_OFFLINE") == "1" and find(model) is None:
            yield f"{key}={model!r} is not in the local hub cache and HF_HUB_OFFLINE=1: download it, or give a folder"
        return
    if not folder.is_dir():
        yield f"{key}={model!r} is not a folder: give one that holds a model in Hugging Face format, or a hub name"
        return
    if not (folder / "config.json").is_file():
        yield f"{key}={model!r} has no config.json: it is not a model in Hugging Face format (export it first)"
        return
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        yield f"{key}={model!r} has no weights (*.safetensors or *.bin)"
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    absent = sorted(name for name in shards if not (folder / name).is_file())
    absent += sorted(file.name for file in folder.glob("*.safetensors") if file.stat().st_size < _POINTER_BYTES)
    if absent:
        names = ", ".join(absent[:3])
        yield f"{key}={model!r} is incomplete: {names} is missing or a git-lfs pointer; download it again"


def _tokenizer_problems(config: DictConfig) -> Iterator[str]:
    # verl hands every prompt, a list of messages, to the chat template; without one it stops after the start of Ray.
    model = config.actor_rollout_ref.model
    key = "tokenizer_path" if model.get("tokenizer_path") else "path"
    folder = find(model[key])
    if key == "tokenizer_path" and folder is None and _looks_like_a_path(model[key]):
        yield f"actor_rollout_ref.model.{key}={model[key]!r} is not a folder: give a tokenizer's, or a name on the hub"
    if folder is None or (key == "path" and not (folder / "config.json").is_file()):
        return
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES)
        yield f"actor_rollout_ref.model.{key}={model[key]!r} has no tokenizer: copy its files ({names}) there"
        return
    file = folder / "tokenizer_config.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not (told.get("chat_template") or any(folder.glob("chat_template*")) or model.get("custom_chat_template")):
        yield (
            f"actor_rollout_ref.model.{key}={model[key]!r} has a tokenizer without a chat template, and prompts are "
            "lists of messages: add chat_template.jinja to the folder, or set "
            "actor_rollout_ref.model.custom_chat_template"
        )
