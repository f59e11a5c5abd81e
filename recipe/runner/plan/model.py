"""Size of a dense decoder: parameters, keys and values per token, arithmetic per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipe.runner.launch.commands import BadInput

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
    """What memory and arithmetic depend on. Sizes in elements; ``hidden`` is H, ``intermediate`` I, ``vocab`` V."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    max_positions: int | None
    qk_norm: bool
    qkv_bias: bool = False
    output_bias: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        """From the fields of a Hugging Face ``config.json``.

        Raises:
            UnknownModelError: for a type other than KNOWN_TYPES, or a size that is missing or none.
        """

        def size(key: str, otherwise: int | None = None) -> int:
            value = otherwise if (given := config.get(key)) is None else given
            if value is None:
                raise UnknownModelError(f"{name}: the model's config.json has no {key}")
            if type(value) is not int or value < 1:
                raise UnknownModelError(f"{name}: {key}={value!r} must be a whole number of 1 or more")
            return value

        kind = config.get("model_type")
        if kind not in KNOWN_TYPES or config.get("mlp_bias"):
            raise UnknownModelError(
                f"{name}: model_type={kind!r} is not a decoder that the planner can count (it knows "
                f"{', '.join(KNOWN_TYPES)}, without biases in the MLP)"
            )
        heads, hidden = size("num_attention_heads"), size("hidden_size")
        return cls(
            name=name,
            hidden=hidden,
            intermediate=size("intermediate_size"),
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", hidden // heads),
            vocab=size("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=config.get("max_position_embeddings"),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            output_bias=kind != "qwen2" and bool(config.get("attention_bias", False)),
        )

    @property
    def query(self) -> int:
        """Width of queries: heads times head dimension."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of keys, and of values."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Entries of one layer's matrices: H (q + 2k) + q H for attention, 3 H I for the gated MLP."""
        return self.hidden * (2 * self.query + 2 * self.key + 3 * self.intermediate)

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer: its matrices, two norms of H, norms of queries and keys, biases."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = (self.query + 2 * self.key) * self.qkv_bias + self.hidden * self.output_bias
        return self.layer_matrices + norms + biases

    @property
    def embedding(self) -> int:
        """Entries of the embedding, and of the output head: V H."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; a tied head is the embedding and counts once."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.embedding + self.hidden

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Keys and values of one token in all layers: 2 k layers elements (vLLM's layout; blocks add at most 15 tokens
        to a sequence)."""
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
        dense = self.layers * self.layer_matrices + self.embedding
        return 2.0 * tokens * dense + 2.0 * self.query * self.layers * squared_lengths


def find_model(path: str, model_config: str | None = None) -> ModelShape:
    """The shape of the model that :func:`read_architecture` finds, with the same arguments and errors."""
    return ModelShape.from_config(*read_architecture(path, model_config))


def read_architecture(path: str, model_config: str | None = None) -> tuple[dict[str, Any], str]:
    """The fields of the ``config.json`` of the model at ``path`` (``actor_rollout_ref.model.path``), and their source.

    Args:
        path: A folder on this machine, or a name on the model hub.
        model_config: A ``config.json``, or the folder that holds one, to read instead.

    Raises:
        UnknownModelError: If there is no such file and the name is none of BUILT_IN, or the file is of another kind.
    """
    file = Path(str(model_config or path)).expanduser()  # a folder may be called 3
    file = file / "config.json" if file.is_dir() or model_config is None else file
    if file.is_file():
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnknownModelError(f"{file} is not a JSON file ({error}); give the model's config.json") from None
        if not isinstance(told, dict):
            raise UnknownModelError(f"{file} is not a model's config.json; give another one")
        return told, str(file)
    if model_config is not None:
        raise UnknownModelError(f"model_config={model_config}: {file} does not exist; give the model's config.json")
    name = Path(path).name.removesuffix("-Base")
    if name not in BUILT_IN:
        raise UnknownModelError(
            f"actor_rollout_ref.model.path={path}: there is no {file} on this machine, and the planner has built-in "
            f"numbers for {', '.join(BUILT_IN)} only: set it to the model's folder, or give recipe.runner.plan the "
            "model's config.json: model_config=PATH"
        )
    return BUILT_IN[name], f"{path} (built-in numbers)"
