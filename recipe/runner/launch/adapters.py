"""LoRA: an adapter that training goes on from, and the layers that one is made for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from fspo.names import did_you_mean
from recipe.runner.launch import model_files
from recipe.runner.launch.values import MachineProblem

_MODEL: Final = "actor_rollout_ref.model"
PATH: Final = f"{_MODEL}.lora_adapter_path"
_SETTINGS: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")


def adapter_problems(config: DictConfig) -> Iterator[str]:
    """An adapter that PEFT could not load or vLLM could not serve; names of layers that the model does not have."""
    model = config.actor_rollout_ref.model
    if not model.get("lora_rank"):
        return
    if not (path := model.get("lora_adapter_path")):
        yield from _layer_problems(model, f"{_MODEL}.", OmegaConf.to_container(model))
        return
    if model_files.looks_like_a_path(path):
        folder = Path(path).expanduser()
        if absent := _absent(folder):
            yield MachineProblem(
                f"{PATH}={path}: {absent} is missing or a git-lfs pointer; give a folder of PEFT's save_pretrained"
            )
            return
        try:
            settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        except ValueError as error:
            yield f"{PATH}={path}: {_SETTINGS} is no JSON ({error}): copy the adapter again"
            return
        # verl takes rank and alpha from the adapter; its own key is vLLM's limit.
        rank = max([settings.get("r") or 0, *(settings.get("rank_pattern") or {}).values()])
        if model.lora_rank < rank:
            given = f"{_MODEL}.lora_rank={model.lora_rank}"
            yield f"{given}: {PATH}={path} has rank {rank}, which vLLM would refuse; give {_MODEL}.lora_rank={rank}"
        yield from _layer_problems(model, f"{PATH}={path}: ", settings)


def _absent(folder: Path) -> str:
    """What of an adapter is not in its folder, or a git-lfs pointer; empty if nothing."""
    if not (folder / _SETTINGS).is_file():
        return _SETTINGS
    sizes = [(folder / name).stat().st_size for name in _WEIGHTS if (folder / name).is_file()]
    return "" if any(size >= model_files.POINTER_BYTES for size in sizes) else " or ".join(_WEIGHTS)


def _made(folder: str, trust: bool) -> Any:
    """The model without weights; None if transformers cannot make it here, which its own checks say."""
    import torch
    from transformers import AutoConfig
    from verl.utils.model import get_hf_auto_model_class

    try:
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        with torch.device("meta"):
            return get_hf_auto_model_class(settings).from_config(settings, trust_remote_code=trust)
    except Exception:
        return None


def _exists(word: str, is_pattern: bool, names: Sequence[str]) -> bool:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    pattern = LoraConfig(target_modules=word if is_pattern else [word])
    return word == "all-linear" or any(check_target_module_exists(pattern, name) for name in names)


def _layer_problems(model: DictConfig, place: str, settings: dict[str, Any]) -> Iterator[str]:
    """Layers that are named in vain: by PEFT's own rules, each name by itself, and then what PEFT says of all.

    A list may be one for several models, and what is left out need not be there: such a name is noted, unless it looks
    like a typing mistake.
    """
    from peft import LoraConfig, get_peft_model

    folder = model_files.model_folder(model.path)
    if folder is None or (made := _made(str(folder), bool(model.get("trust_remote_code")))) is None:
        return
    names = {
        "target_modules": [name for name, _ in made.named_modules()],
        "exclude_modules": [name for name, _ in made.named_modules()],
        "target_parameters": [name for name, _ in made.named_parameters()],
    }
    wanted = {key: settings[key] for key in names if settings.get(key)}
    for key, value in wanted.items():
        words = [value] if isinstance(value, str) else value
        absent = [word for word in words if not _exists(word, isinstance(value, str), names[key])]
        known = sorted({name.rpartition(".")[2] for name in names[key]} - {""})
        known = [name for name in known if not name.isdigit()]
        for word in absent:
            sentence = f"{place}{key}={value}: the model has no {word}"
            hint = did_you_mean(word, known)
            if hint or (key != "exclude_modules" and len(absent) == len(words)):
                yield f"{sentence}{hint}; its names: {', '.join(known)}"
                return
            print(f"note: {sentence}", file=sys.stderr)
    try:
        get_peft_model(made, LoraConfig(task_type="CAUSAL_LM", r=8, **wanted))
    except Exception as error:
        given = ", ".join(f"{place}{key}={value}" for key, value in wanted.items())
        yield f"{given}: PEFT refuses it ({' '.join(str(error).split())[:300]}); name linear layers, or all-linear"
