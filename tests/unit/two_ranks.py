"""``python two_ranks.py FOLDER``: verl's engine as the 8B job configures it, on two gloo ranks and a small model.

A process of its own, which forks: run by test_gpu_contract.py. flash-attn is replaced by the same attention from torch.
"""

from __future__ import annotations

import collections
import copy
import functools
import os
import sys
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers.modeling_flash_attention_utils as flash_attention
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from recipe.fspo.main import composed as compose

LENGTHS = (17, 23, 9)


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


def engine_of(config: Any, folder: str) -> Any:
    """verl's FSDP engine of the actor, for the ``config.json`` in ``folder``, before anything is built."""
    everything = copy.deepcopy(config.actor_rollout_ref)
    OmegaConf.set_struct(everything, False)
    everything.model.update(path=folder, hf_config_path=None, tokenizer_path=None, load_tokenizer=False)
    everything.actor.fsdp_config.use_torch_compile = False
    actor = omega_conf_to_dataclass(everything.actor)
    return FSDPEngineWithLMHead(omega_conf_to_dataclass(everything.model), actor.engine, actor.optim, actor.checkpoint)


def rank_of_two(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    actor = "actor_rollout_ref.actor"
    config = compose(
        [
            "experiment=qwen3_8b",
            f"{actor}.ulysses_sequence_parallel_size=2",
            f"{actor}.pad_to_length=true",
            f"{actor}.fsdp_config.pad_to_length_bucket=64",
            f"+{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
            "actor_rollout_ref.model.override_config.attn_implementation=sdpa",  # flash-attn is not installed
            f"{actor}.optim.total_training_steps=1",
        ]
    )
    engine = engine_of(config, folder)
    engine._build_model_optimizer()
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor.full_tensor(), load_file(f"{folder}/model.safetensors")[name].float()), name

    for module in engine.module.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    ids = torch.randint(0, 512, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits = torch.cat([plain(input_ids=one[None], use_cache=False).logits[0] for one in ids.split(LENGTHS)])
    truth = logits.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]
    truth.sum().backward()

    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    columns = {"input_ids": ids, "position_ids": positions}
    nested = {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in columns.items()}
    batch = TensorDict(nested, batch_size=[len(LENGTHS)])
    tensordict_utils.assign_non_tensor(batch, temperature=1.0, calculate_entropy=False)
    computed = {}

    def loss(model_output: Any, **_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        computed["log_probs"] = model_output["log_probs"].values()
        return computed["log_probs"].sum(), {}

    with engine.train_mode():
        engine.forward_step(batch, loss_function=loss, forward_only=False)[0].backward()
        torch.testing.assert_close(computed["log_probs"], truth, rtol=0, atol=2e-5)
        for (name, parameter), expected in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-3, msg=name)
    print("same weights, log-probs and gradients", flush=True)


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


if __name__ == "__main__":
    start(sys.argv[1], rank_of_two)
