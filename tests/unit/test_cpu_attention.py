"""The attention for packs gives what transformers' own gives, forward and backward, and looks at no other sequence."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from recipe.runner.cpu.attention import NAME, packed_attention

ORIGINAL = "original_sdpa"
AttentionInterface.register(ORIGINAL, sdpa_attention_forward)
AttentionMaskInterface.register(ORIGINAL, sdpa_mask)


@pytest.fixture(scope="module")
def models() -> dict[str, Qwen3ForCausalLM]:
    """One model, with each attention; fewer heads for keys and values than for queries."""
    by_attention = {}
    for attention in (ORIGINAL, NAME):
        torch.manual_seed(0)
        config = Qwen3Config(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, vocab_size=11, attn_implementation=attention,
        )  # fmt: skip
        by_attention[attention] = Qwen3ForCausalLM(config)
    return by_attention


def pack(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    tokens = torch.randint(11, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}


@pytest.mark.parametrize("lengths", [(7, 1, 23, 12), (31,), (1, 1, 1)])
def test_a_pack_gives_what_sdpa_with_its_mask_gives(
    models: dict[str, Qwen3ForCausalLM], lengths: tuple[int, ...]
) -> None:
    logits, gradients = {}, {}
    for attention, model in models.items():
        model.zero_grad()
        logits[attention] = model(**pack(lengths), use_cache=False).logits
        logits[attention].logsumexp(-1).sum().backward()
        gradients[attention] = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(logits[NAME], logits[ORIGINAL], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[NAME], gradients[ORIGINAL], rtol=1e-4, atol=1e-5)


def test_padded_batches_go_the_way_of_sdpa(models: dict[str, Qwen3ForCausalLM]) -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0  # verl pads prompts on the left
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(2))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        batch = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        logits = {name: model(**batch, use_cache=False).logits for name, model in models.items()}
    torch.testing.assert_close(logits[NAME][mask.bool()], logits[ORIGINAL][mask.bool()], rtol=1e-5, atol=1e-6)


def test_a_model_that_does_not_tell_the_positions_is_refused() -> None:
    states = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"Linear .*attn_implementation=eager"):
        packed_attention(torch.nn.Linear(1, 1), states, states, states, None, scaling=1.0)
