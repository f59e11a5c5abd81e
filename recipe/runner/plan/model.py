"""Size of a dense decoder: parameters as transformers builds it, keys and values per token, arithmetic per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.inputs import model_folder

#: Decoders of the same shape: grouped-query attention, gated MLP with three matrices, RMSNorm, rotary positions.
KNOWN_TYPES: Final = ("qwen3", "qwen2", "llama")

_QWEN3: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
#: Architecture of the experiments' two models, for when they are not on this machine. Source: Qwen3 Technical Report
#: (arXiv 2505.09388), table 1, and the config.json of Qwen/Qwen3-1.7B-Base and Qwen/Qwen3-8B-Base on the model hub.
BUILT_IN: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-1.7B": _QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


class UnknownModelError(BadInput):
    """The model's architecture is not known; the message says which file is missing and how to give it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory and arithmetic depend on, in elements. ``matrices``: a layer's parameters without norms and biases;
    ``query`` and ``key``: widths of all heads together."""

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
    parameters: int

    @classmethod
    def from_config(cls, fields: Mapping[str, Any], name: str) -> ModelShape:
        """From the fields of a Hugging Face ``config.json``; the parameters are counted on the meta device.

        Raises:
            UnknownModelError: for a type other than KNOWN_TYPES, or sizes from which transformers builds no model.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if (kind := fields.get("model_type")) not in KNOWN_TYPES:
            raise UnknownModelError(
                f"{name}: model_type={kind!r} is not a decoder that the planner can count; it knows "
                f"{', '.join(KNOWN_TYPES)}"
            )
        try:
            config = AutoConfig.for_model(**fields)
            with torch.device("meta"):
                module = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # of many kinds, for a size that is missing, none or 0
            raise UnknownModelError(f"{name}: transformers builds no model of this config.json: {error}") from None
        layer = list(module.model.layers[0].parameters())
        head_dim = module.model.layers[0].self_attn.head_dim
        return cls(
            name=name,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            query=config.num_attention_heads * head_dim,
            key=config.num_key_value_heads * head_dim,
            vocab=config.vocab_size,
            tied=config.tie_word_embeddings,
            max_positions=config.max_position_embeddings,
            qk_norm=kind == "qwen3",
            matrices=sum(parameter.numel() for parameter in layer if parameter.dim() == 2),
            layer_parameters=sum(parameter.numel() for parameter in layer),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
        )

    @property
    def embedding(self) -> int:
        """Entries of the embedding, and of the output head."""
        return self.vocab * self.hidden

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Keys and values of one token in all layers (vLLM's layout; blocks add at most 15 tokens to a sequence)."""
        return 2 * self.key * self.layers * element_bytes

    def forward_flops(self, tokens: float, squared_lengths: float) -> float:
        """Floating-point operations of one forward pass.

        ``2 tokens (layers x matrices + V H) + 2 q layers sum L^2``: two operations per matrix entry and token, and two
        products of L x q with a causal mask, of which half is computed. The embedding is a look-up and costs nothing.
        A backward pass takes twice as many. Source: the counting of verl 0.9.1's ``flops_counter`` (which counts the
        look-up as a product, too).

        Args:
            tokens: Of all sequences together.
            squared_lengths: Sum over sequences of the square of their length.
        """
        dense = self.layers * self.matrices + self.embedding
        return 2.0 * tokens * dense + 2.0 * self.query * self.layers * squared_lengths


def read_architecture(path: str, model_config: str | None = None) -> tuple[dict[str, Any], str]:
    """The fields of the ``config.json`` of the model at ``path`` (``actor_rollout_ref.model.path``), and their source.

    Args:
        path: A folder on this machine, or a name on the model hub.
        model_config: A ``config.json``, or the folder that holds one, to read instead.

    Raises:
        UnknownModelError: If there is no such file and the name is none of BUILT_IN, or the file is of another kind.
    """
    folder = (
        model_folder(path) if model_config is None else Path(str(model_config)).expanduser()
    )  # a folder may be called 3
    file = folder / "config.json" if folder is not None and folder.is_dir() else folder
    if file is not None and file.is_file():
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnknownModelError(f"{file} is not a JSON file ({error}); give the model's config.json") from None
        if not isinstance(fields, dict):
            raise UnknownModelError(f"{file} is not a model's config.json; give another one")
        return fields, str(file)
    if model_config is not None:
        raise UnknownModelError(f"model_config={model_config}: {file} does not exist; give the model's config.json")
    name = Path(path).name.removesuffix("-Base")
    if name not in BUILT_IN:
        raise UnknownModelError(
            f"actor_rollout_ref.model.path={path}: the model is not on this machine, and the planner has built-in "
            f"numbers for {', '.join(BUILT_IN)} only: set it to the model's folder, or give the planner the "
            "model's config.json: model_config=PATH"
        )
    return BUILT_IN[name], f"{path} (built-in numbers)"
