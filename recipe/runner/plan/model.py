"""Size of a dense decoder: parameters as transformers builds it, keys and values per token, arithmetic per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.model_files import model_folder

#: Decoders of the same shape: grouped-query attention, gated MLP with three matrices, RMSNorm, rotary positions.
KNOWN_TYPES: Final = ("qwen3", "qwen2", "llama")

#: The config.json of the experiments' models, for when they are not on this machine: one file per name. Source: Qwen3
#: Technical Report (arXiv 2505.09388), table 1, and on the hub Qwen3-0.6B, Qwen3-1.7B-Base, Qwen3-8B-Base,
#: Qwen2.5-0.5B-Instruct.
BUILT_IN: Final = Path(__file__).with_name("models")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory and arithmetic depend on, in elements. ``matrices``: a layer's parameters without norms and biases;
    ``query`` and ``key``: widths of all heads together; ``tensors``: one entry a tensor."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    query: int
    key: int
    vocab: int
    tied: bool
    max_positions: int | None
    qk_norm: bool
    matrices: int
    layer_parameters: int
    tensors: tuple[int, ...]
    parameters: int

    @classmethod
    def from_config(cls, fields: Mapping[str, Any], name: str) -> ModelShape:
        """From the fields of a Hugging Face ``config.json``; the parameters are counted on the meta device.

        Raises:
            BadInput: for a type other than KNOWN_TYPES, or sizes from which transformers builds no model.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if (kind := fields.get("model_type")) not in KNOWN_TYPES:
            raise BadInput(
                f"{name}: model_type={kind!r} is not a decoder that the planner can count; it knows "
                f"{', '.join(KNOWN_TYPES)}. Its run is not affected: measure its first steps instead"
            )
        try:
            config = AutoConfig.for_model(**fields)
            with torch.device("meta"):
                # A config.json may ask for flash-attn, which this machine need not have.
                module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        except Exception as error:  # of many kinds, for a size that is missing, none or 0
            raise BadInput(f"{name}: transformers builds no model of this config.json: {error}") from None
        layer = list(module.model.layers[0].parameters())
        attention = module.model.layers[0].self_attn
        tensors = tuple(parameter.numel() for parameter in module.parameters())
        return cls(
            name=name,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            query=config.num_attention_heads * attention.head_dim,
            key=config.num_key_value_heads * attention.head_dim,
            vocab=config.vocab_size,
            tied=config.tie_word_embeddings,
            max_positions=config.max_position_embeddings,
            qk_norm=hasattr(attention, "q_norm"),
            matrices=sum(parameter.numel() for parameter in layer if parameter.dim() == 2),
            layer_parameters=sum(parameter.numel() for parameter in layer),
            tensors=tensors,
            parameters=sum(tensors),
        )

    @property
    def embedding(self) -> int:
        """Entries of the embedding, and of the output head."""
        return self.vocab * self.hidden

    def pinned_bytes(self, element_bytes: int, shards: int) -> float:
        """Bytes of one rank's pinned copy: PyTorch's allocator takes a power of two for each tensor, and keeps it."""
        return float(sum(1 << (-(-size * element_bytes // shards) - 1).bit_length() for size in self.tensors))

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Keys and values of one token in all layers (vLLM's layout; blocks add at most 15 tokens to a sequence)."""
        return 2 * self.key * self.layers * element_bytes


def read_architecture(path: str, model_config: str | None = None) -> tuple[dict[str, Any], str]:
    """The fields of the ``config.json`` of the model at ``path``, and their source.

    ``path`` is a folder, or a name on the hub; ``model_config`` a file, or the folder that holds one, to read instead.
    Raises BadInput if there is no such file and none in BUILT_IN, or the file is of another kind.
    """
    # A folder may be called 3.
    place = model_folder(path) if model_config is None else Path(str(model_config)).expanduser()
    built_in = BUILT_IN / f"{Path(path).name}.json"
    if place is None and built_in.is_file():
        return json.loads(built_in.read_text(encoding="utf-8")), f"{path} (built-in numbers)"
    if place is None:
        raise BadInput(
            f"actor_rollout_ref.model.path={path}: the model is not on this machine, and the planner has built-in "
            f"numbers for {', '.join(sorted(file.stem for file in BUILT_IN.iterdir()))} only: set it to the model's "
            "folder, or give the planner the model's config.json: model_config=PATH"
        )
    file = place / "config.json" if place.is_dir() else place
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))), str(file)
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{file} is not a model's config.json ({error}): give another one, model_config=PATH") from None
