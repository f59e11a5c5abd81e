"""Two gloo ranks and a small model for worker_update.py; flash-attn is replaced by the same attention from torch."""

from __future__ import annotations

import collections
import functools
import os
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
import torch.nn.functional as F
import transformers.modeling_flash_attention_utils as flash_attention
from transformers import Qwen3Config, Qwen3ForCausalLM


def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **named: Any) -> torch.Tensor:
    """``flash_attn_varlen_func``: attention within each of the sequences that lie one after the other."""
    assert named.pop("causal") and set(named) <= {"max_seqlen_q", "max_seqlen_k", "softmax_scale", "dropout_p"}, named
    outputs = []
    for begin, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        one = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
        outputs.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outputs)


def dense(*_: Any, **__: Any) -> None:
    raise AssertionError("the sequences of the pack were not kept apart")


def start(folder: str, function: Any, *arguments: Any) -> None:
    """Run ``function(rank, folder, *arguments)`` in two processes, with a small model in ``folder``."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).to(torch.bfloat16).save_pretrained(folder)
    takes = collections.defaultdict(bool, dict.fromkeys(("dropout_p", "max_seqlen_q", "max_seqlen_k"), True))
    take = functools.partial(flash_attention._process_flash_attention_kwargs, supports_mapping=takes)
    functions = (dense, varlen, None, None, None)
    flash_attention.lazy_import_flash_attention = lambda *_, **__: (functions, take)
    torch.multiprocessing.start_processes(function, (folder, *arguments), nprocs=2, start_method="fork")
