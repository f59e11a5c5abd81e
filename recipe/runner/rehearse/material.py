"""What the small run reads: a small model and a few rows of each data file, made up where there is nothing of them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig

from fspo.data.check import read_table
from recipe.runner.launch.end_of_turn import generation_eos
from recipe.runner.launch.inputs import data_files, generated_files, model_folder
from recipe.runner.plan.model import read_architecture

#: The small model: two layers of at most so many heads, of a size that vLLM's attention for CPUs has.
LAYERS, KV_HEADS, HEADS_PER_KV, HEAD_SIZE = 2, 2, 4, 32
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Rows of a file among which the shortest prompts are looked for.
_SEARCHED: Final = 2048
_FILES: Final = ("train_files", "val_files")


def absent(config: DictConfig, substitute: Collection[str]) -> list[str]:
    """Names of the model and the data files of a prepared job that are not on this machine but may be made up.

    ``substitute`` says which of ``data`` and ``model`` may be.
    """
    path = config.actor_rollout_ref.model.path
    names = [path] if "model" in substitute and model_folder(path) is None else []
    if "data" in substitute and not generated_files(config):
        names += [file for key in _FILES for file in data_files(config, key) if not Path(file).is_file()]
    return names


def small_model(path: str, folder: Path) -> Any:
    """Write a model of the same architecture with random weights and the model's own tokenizer; returns the latter.

    Ratio of query heads to key heads, tied or untied embeddings, biases, norms and positions stay; layers, heads and
    widths shrink, and the vocabulary to the tokenizer's. Without the model the tokenizer is one of bytes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    fields, _ = read_architecture(path)
    own = model_folder(path)
    tokenizer = byte_tokenizer(fields["max_position_embeddings"]) if own is None else AutoTokenizer.from_pretrained(own)
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
    if own is not None:
        model.generation_config.eos_token_id = generation_eos(str(own), trust_remote_code=False) or None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def byte_tokenizer(max_length: int) -> Any:
    """A tokenizer of Qwen's kind without merges: a token for each byte, and the tokens of its chat template.

    It has to be of the model's kind: transformers loads the tokenizer of a Qwen2 as one, whatever its files say.
    Its eos is not the token that ends a turn, as with Qwen3's base models.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab={symbol: number for number, symbol in enumerate(sorted(ByteLevel.alphabet()))},
        merges=[],
        unk_token=None,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=max_length,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def small_data(config: DictConfig, folder: Path, tokenizer: Any, rows: int) -> tuple[dict[str, Any], int]:
    """Copy the rows with the shortest prompts of each data file; of a file that is not here, write rows like verl's.

    ``folder`` gets the small files of the prepared job, each with ``rows`` rows if the file holds as many.

    Returns:
        ``data.train_files`` and ``data.val_files``, and the tokens of the longest prompt in them. No files where the
        run writes those of an embedded task itself.
    """
    import pyarrow as pa
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
            if Path(file).is_file():
                table = read_table(Path(file)).slice(0, _SEARCHED)
            else:
                table = pa.Table.from_pylist([_addition(config.data.prompt_key, row) for row in range(rows)])
            prompts = table[config.data.prompt_key].to_pylist()
            lengths = [len(tokenizer.apply_chat_template(prompt, **template)) for prompt in prompts]
            shortest = sorted(range(len(lengths)), key=lengths.__getitem__)[:rows]
            longest = max(longest, lengths[shortest[-1]])
            settings[f"data.{key}"].append(str(folder / f"{key}-{number}-{Path(file).stem}.parquet"))
            pq.write_table(table.take(shortest), settings[f"data.{key}"][-1])
    return settings, longest


def _addition(prompt_key: str, number: int) -> dict[str, Any]:
    """A row in verl's schema, of a data source that verl's own reward knows, too."""
    return {
        "data_source": "math_dapo",
        prompt_key: [{"role": "user", "content": f"What is {number} + {number + 1}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number + 1)},
        "extra_info": {"index": number},
    }
