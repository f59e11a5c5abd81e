"""What the rehearsal reads: a few rows of each data file, a small model, stand-ins for what is not on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from fspo.data.prepare import TEMPLATES, verl_row
from fspo.data.sources import SOURCES, Problem
from fspo.files import local_path, write_rows
from recipe.runner.launch.data_files import data_files
from recipe.runner.launch.model_folder import find
from recipe.runner.plan.model import read_architecture

#: The small model: two layers of at most so many heads, of a size that vLLM's attention for CPUs has.
LAYERS, KV_HEADS, HEADS_PER_KV, HEAD_SIZE = 2, 2, 4, 32
#: Its tokenizer has a token for each character; all but digits and signs have the same.
_CHARACTERS: Final = "pkg://fspo.data/assets/demo_model"
#: Rows of a file among which the shortest prompts are looked for.
_SEARCHED: Final = 2048
_FILES: Final = ("train_files", "val_files")


def stand_ins(config: DictConfig, out: Path, substitute: Sequence[str], not_covered: list[str]) -> list[str]:
    """Make up what is missing and may be made up.

    Args:
        config: The job, composed.
        out: Folder of the stand-ins.
        substitute: Which of ``data`` and ``model`` may be made up.
        not_covered: Gets a sentence for each.

    Returns:
        Overrides that name the stand-ins.

    Raises:
        UnknownModelError: for a model whose size is not known.
    """
    overrides, path = [], config.actor_rollout_ref.model.path
    if "model" in substitute and find(local_path(path)) is None:
        _stand_in_model(path, out / "stand-ins" / "model")
        overrides.append(f"actor_rollout_ref.model.path={json.dumps(str(out / 'stand-ins' / 'model'))}")
        not_covered.append(f"{path}: only its size is known; tokenizer and chat template are made up")
    for key in _FILES if "data" in substitute and not config.fspo.get("offline_task") else ():
        files = data_files(config, key)
        for number, name in enumerate(files):
            if not Path(name).expanduser().is_file():
                files[number] = str(out / "stand-ins" / Path(name).with_suffix(".parquet").name)
                _stand_in_rows(Path(files[number]), config.data.train_batch_size if key == "train_files" else 8)
                not_covered.append(f"{name}: rows of the same columns are made up")
        overrides.append(f"data.{key}={json.dumps(files)}")
    return overrides


def _stand_in_rows(path: Path, count: int) -> None:
    """Additions in verl's schema, as ``python -m fspo.data prepare`` writes a data set of the file's name."""
    source = SOURCES.get(path.stem) or dataclasses.replace(SOURCES["math500"], name=path.stem)
    problems = [Problem(f"What is {i} + {i + 1}?", str(2 * i + 1), str(i)) for i in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows([verl_row(source, index, each, TEMPLATES["boxed"]) for index, each in enumerate(problems)], path)


def _stand_in_model(path: str, folder: Path) -> None:
    """A model's folder with the right ``config.json``, a tokenizer of characters, and no weights worth the name."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    fields, _ = read_architecture(path)
    architecture = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        architecture.architectures = [type(AutoModelForCausalLM.from_config(architecture)).__name__]
    architecture.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(local_path(_CHARACTERS))
    tokenizer.model_max_length = fields["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    save_file({"nothing": torch.zeros(1024)}, folder / "model.safetensors")


def small_model(path: str, folder: Path) -> Any:
    """Write a model of the same architecture with random weights and the model's own tokenizer; returns the latter.

    Ratio of query heads to key heads, tied or untied embeddings, biases, norms and positions stay; layers, heads and
    widths shrink, and the vocabulary to that of a tokenizer that has been made up.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    origin = find(path)
    assert origin is not None  # Rehearsal.checks
    fields = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(origin)
    if origin.parent.name == "stand-ins":
        fields |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    heads, kv_heads = fields["num_attention_heads"], fields.get("num_key_value_heads") or fields["num_attention_heads"]
    kept = min(kv_heads, KV_HEADS)
    hidden = kept * min(heads // kv_heads, HEADS_PER_KV) * HEAD_SIZE
    small = {
        "num_hidden_layers": min(fields["num_hidden_layers"], LAYERS),
        "num_key_value_heads": kept,
        "num_attention_heads": hidden // HEAD_SIZE,
        "head_dim": HEAD_SIZE,
        "intermediate_size": hidden * fields["intermediate_size"] // fields["hidden_size"],
        "hidden_size": hidden,
    }
    of_each_layer = ("layer_types", "max_window_layers")
    fields = {name: value for name, value in fields.items() if name not in of_each_layer}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(fields | small)), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def small_data(config: DictConfig, folder: Path, tokenizer: Any, rows: int) -> tuple[dict[str, list[str]], int]:
    """Copy the rows with the shortest prompts of each data file; every data source of a file keeps at least one.

    Args:
        config: The job, prepared.
        folder: Where the small files go.
        tokenizer: Of the model.
        rows: Of the training files together, and of each validation file, if they hold as many.

    Returns:
        The small files by key of ``data``, and the tokens of the longest prompt in them. No files where the run writes
        those of an embedded task itself.
    """
    if config.fspo.get("offline_task"):
        return {}, config.data.max_prompt_length
    written: dict[str, list[str]] = {}
    longest = 1
    for key in _FILES:
        for file in data_files(config, key):
            table = _read(file, folder)
            prompts = table[config.data.prompt_key].to_pylist()
            lengths = [_tokens(prompt, tokenizer, config) for prompt in prompts]
            order = sorted(range(len(lengths)), key=lengths.__getitem__)
            sources = table["data_source"].to_pylist()
            shortest = {sources[row]: row for row in reversed(order)}.values()
            chosen = list(dict.fromkeys([*shortest, *order]))[: max(rows, len(shortest))]
            longest = max(longest, *(lengths[row] for row in chosen))
            written.setdefault(key, []).append(_write(table.take(chosen), folder / key, file))
    return written, longest


def _read(file: str, folder: Path) -> Any:
    import pyarrow.parquet as pq

    if not file.endswith(".parquet"):
        from datasets import Dataset

        return Dataset.from_json(file, cache_dir=str(folder / "cache")).data.table.slice(0, _SEARCHED)
    return pq.read_table(file).slice(0, _SEARCHED)


def _write(table: Any, folder: Path, file: str) -> str:
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{len(list(folder.iterdir()))}-{Path(file).stem}.parquet"
    pq.write_table(table, path)
    return str(path)


def _tokens(prompt: Any, tokenizer: Any, config: DictConfig) -> int:
    """Tokens of a prompt as verl's data set counts them."""
    further = OmegaConf.to_container(config.data.get("apply_chat_template_kwargs") or OmegaConf.create({}))
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **further))
