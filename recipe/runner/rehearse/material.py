"""What the rehearsal reads: a few rows of each data file, a small model, stand-ins for what is not on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig

from fspo.data.check import read_table
from fspo.files import local_path, write_rows
from recipe.runner.launch.inputs import data_files, generated_files, model_folder
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
    if "model" in substitute and model_folder(local_path(path)) is None:
        folder = out / "stand-ins" / "model"
        _stand_in_model(path, folder)
        overrides.append(f"actor_rollout_ref.model.path={json.dumps(str(folder))}")
        not_covered.append(f"{path}: only its size is known; tokenizer and chat template are made up")
    for key in _FILES if "data" in substitute and not config.data.get("offline_task") else ():
        files = data_files(config, key)
        for number, name in enumerate(files):
            if not Path(name).expanduser().is_file():
                files[number] = str(out / "stand-ins" / Path(name).with_suffix(".parquet").name)
                _stand_in_rows(Path(files[number]), config.data.train_batch_size if key == "train_files" else 8)
                not_covered.append(f"{name}: rows of the same columns are made up")
        overrides.append(f"data.{key}={json.dumps(files)}")
    return overrides


def _stand_in_rows(path: Path, count: int) -> None:
    """Additions in verl's schema, of a data source that verl's own reward knows, too."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"What is {number} + {number + 1}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(rows, path)


def _stand_in_model(path: str, folder: Path) -> None:
    """A model's folder with the right ``config.json``, a tokenizer of characters, and no weights worth the name."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    fields, _ = read_architecture(path)
    tokenizer = AutoTokenizer.from_pretrained(local_path(_CHARACTERS))
    tokenizer.model_max_length = fields["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file({"nothing": torch.zeros(1024)}, folder / "model.safetensors")


def small_model(path: str, folder: Path) -> Any:
    """Write a model of the same architecture with random weights and the model's own tokenizer; returns the latter.

    Ratio of query heads to key heads, tied or untied embeddings, biases, norms and positions stay; layers, heads and
    widths shrink, and the vocabulary to the tokenizer's.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    fields, _ = read_architecture(path)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(path))
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
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
    }
    of_each_layer = ("layer_types", "max_window_layers")
    fields = {name: value for name, value in fields.items() if name not in of_each_layer}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(fields | small)), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def small_data(config: DictConfig, folder: Path, tokenizer: Any, rows: int) -> tuple[dict[str, Any], int]:
    """Copy the rows with the shortest prompts of each data file.

    Args:
        config: The job, prepared.
        folder: Where the small files go.
        tokenizer: Of the model.
        rows: Of each file, if it holds as many.

    Returns:
        ``data.train_files`` and ``data.val_files``, and the tokens of the longest prompt in them. No files where the
        run writes those of an embedded task itself.
    """
    import pyarrow.parquet as pq

    if generated_files(config):
        return {}, config.data.max_prompt_length
    # As verl's data set counts them.
    template = {"add_generation_prompt": True, "return_dict": False, **(config.data.apply_chat_template_kwargs or {})}
    settings: dict[str, Any] = {f"data.{key}": [] for key in _FILES}
    longest = 1
    folder.mkdir(parents=True)
    for key in _FILES:
        for number, file in enumerate(data_files(config, key)):
            table = read_table(Path(file)).slice(0, _SEARCHED)
            prompts = table[config.data.prompt_key].to_pylist()
            tokens = [tokenizer.apply_chat_template(prompt, **template) for prompt in prompts]
            lengths = {row: len(ids) for row, ids in enumerate(tokens)}
            shortest = sorted(lengths, key=lengths.__getitem__)[:rows]
            longest = max(longest, lengths[shortest[-1]])
            settings[f"data.{key}"].append(str(folder / f"{key}-{number}-{Path(file).stem}.parquet"))
            pq.write_table(table.take(shortest), settings[f"data.{key}"][-1])
    return settings, longest
