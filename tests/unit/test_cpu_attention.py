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


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(1))


def pack(*lengths: int) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens(1, sum(lengths)), "position_ids": positions}


PADDED = torch.arange(9) >= torch.tensor([[4], [0]])  # verl pads prompts on the left
PADDED_BATCH = {"attention_mask": PADDED.long(), "position_ids": (PADDED.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.parametrize(
    "batch", [pack(7, 1, 23, 12), pack(31), pack(1, 1, 1), PADDED_BATCH | {"input_ids": tokens(2, 9)}]
)
def test_a_batch_gives_what_sdpa_with_its_mask_gives(batch: dict[str, torch.Tensor]) -> None:
    given = []
    for attention in (ORIGINAL, NAME):
        torch.manual_seed(0)
        config = Qwen3Config(  # fewer heads for keys and values than for queries
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, vocab_size=11, attn_implementation=attention,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        logits = model(**batch, use_cache=False).logits[batch.get("attention_mask", torch.ones(1)).bool()]
        logits.logsumexp(-1).sum().backward()
        given.append([logits, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(given[1], given[0], rtol=1e-4, atol=1e-5)


def test_a_model_that_does_not_tell_the_positions_is_refused() -> None:
    states = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"Linear .*attn_implementation=eager"):
        packed_attention(torch.nn.Linear(1, 1), states, states, states, None, scaling=1.0)
