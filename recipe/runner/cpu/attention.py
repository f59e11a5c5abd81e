"""Attention over packed sequences on a CPU: only what one sequence sees of itself is computed.

For a pack of T tokens transformers' ``sdpa`` computes all T^2 scores of a layer, most of them to throw them away;
flash-attn, which does not, needs a GPU. Here each sequence is one call. Importing this module puts it in the place of
``sdpa`` in this process: under another name a checkpoint's ``config.json`` would ask for it wherever the model is
loaded. Padded batches are unchanged.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME: Final = "sdpa"


def sequence_lengths(positions_T: torch.Tensor) -> list[int]:
    """Lengths of the sequences of a pack, each of which counts its positions by itself."""
    begins = torch.diff(positions_T, prepend=positions_T[:1]) != 1
    begins[0] = True
    starts = begins.nonzero().flatten()
    return torch.diff(starts, append=starts.new_tensor([len(positions_T)])).tolist()


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: ``query`` [B, heads, T, size] and so on to [B, T, heads, size].

    ``position_ids`` [1, T] among the keyword arguments tell the sequences of a pack apart. Raises ValueError if a model
    does not hand them to its attention.
    """
    if attention_mask is not None or query.shape[0] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    positions = kwargs.get("position_ids")
    if positions is None or positions.dim() != 2:
        raise ValueError(
            f"{type(module).__name__} is not told the positions of the tokens, by which the sequences of a pack are "
            "told apart: set actor_rollout_ref.model.override_config.attn_implementation=eager"
        )
    lengths = sequence_lengths(positions[0])
    parts = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *part, None, **kwargs)[0] for part in parts]
    return torch.cat(outputs, dim=1), None


def _mask(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """A pack has no mask; padding has."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **kwargs)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _mask)
